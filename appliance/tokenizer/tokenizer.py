"""A model's tokenizer: encodes texts and chats, decodes ids."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.dialects import Dialect, learn_dialect
from appliance.errors import ChatTemplateError, ModelError, RequestError
from appliance.tokenizer.chat_template import check_nesting, marked_end, text_before
from appliance.tokenizer.control_tokens import ContentGuard, ControlTokens, Occurrence
from appliance.tokenizer.from_folder import load_from_folder
from appliance.tokenizer.from_gguf import load_from_gguf
from appliance.tokenizer.known_texts import KnownTexts
from appliance.tokenizer.pieces import Spelling, piece_bytes
from appliance.tokenizer.source import new_separator, with_separator

if TYPE_CHECKING:
    from tokenizers import AddedToken

    from appliance.tokenizer.chat_template import ChatTemplate
    from appliance.tokenizer.isolation import IsolatedTemplate
    from appliance.tokenizer.source import TokenizerSource

logger = logging.getLogger(__name__)


Beside = Mapping[str, tuple[str, str]]  # texts before and behind a control token, by its text

MAX_ADDED = 1024  # characters of an added token, which each text is searched for
_CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")  # <tool_call>, [TOOL_CALLS]


class WholeText(dict[int, str | None]):
    def __init__(self, find_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find_bytes = find_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._find_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class Tokenizer:
    """A model's tokenizer; thread-safe.

    Attributes:
        vocab_size: one more than the highest token id.
        bos_token_id: the token that begins a text, if there is one.
        add_bos: `add_special_tokens` puts BOS in front.
        chat_template: None for a base model.
        retrieval: how the model embeds texts and judges relevance.
        notes: what was assumed where the file is silent or wrong, for the user.
        whole_text: each token's text in an answer; None if it ends within a character.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        self.chat_template = source.chat_template
        self.sampling = source.sampling
        self.retrieval = source.retrieval
        self.notes = source.notes

        added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self.vocab_size = max(self._backend.get_vocab_size(), *(i + 1 for i in added), 0)
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        if (longest := max(map(len, self._added_text.values()), default=0)) > MAX_ADDED:
            raise ModelError(
                f"the tokenizer adds a token of {longest} characters, more than {MAX_ADDED}; "
                "download it again"
            )
        control = {token_id: token for token_id, token in added.items() if token.special}
        self._control_ids = frozenset(control)
        self._control_tokens = ControlTokens({} if source.split_special_tokens else control)
        self._spelling = _spelling(self._backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self.whole_text = WholeText(self._find_visible_bytes)

        # The library finds control tokens in all of a text or in none. It is set to none; a
        # separator, which no text can contain, stands for wanted ones.
        self._encoder = source.encoder
        self._separator = new_separator() if self._encoder is None else self._encoder.separator
        with_separator(self._backend, self._separator)
        self._separator_id = self._backend.token_to_id(self._separator)
        self._isolated: IsolatedTemplate | None = None
        # The library tokenizes text after a separator as a beginning.
        self._known_texts = KnownTexts(self._encode_texts)
        self.add_bos = self.bos_token_id is not None and self.encode("", add_special_tokens=True)[
            :1
        ] == [self.bos_token_id]

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a GGUF file or Hugging Face folder; a bad one raises ModelError."""
        source = load_from_folder(path) if path.is_dir() else load_from_gguf(path)
        for note in source.notes:
            logger.warning("%s", note)
        return cls(source)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        allow_special: bool = True,
        beside: Beside | None = None,
    ) -> list[int]:
        """Encode a text.

        Args:
            add_special_tokens: prepend BOS if the model wants it.
            allow_special: True makes `<|im_end|>` in the text the control token, False plain text.
            beside: texts to put before and behind control tokens.

        Raises:
            RequestError: the text contains lone surrogates.
        """
        occurrences = self._control_tokens.find(_valid(text)) if allow_special else []
        pieces = self._with_texts(beside, _split(text, occurrences), occurrences)
        return self._encode_pieces(pieces, occurrences, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Encode two texts as one pair, without control tokens in them.

        Returns:
            The ids, and the index at which the second text begins.

        Raises:
            RequestError: a text contains lone surrogates.
        """
        begin, middle, end = self._pair_frame
        one, other = self._encode_texts([_valid(first), _valid(second)])
        head = [*begin, *one, *middle]
        return [*head, *other, *end], len(head)

    @cached_property
    def _pair_frame(self) -> tuple[list[int], list[int], list[int]]:
        """Control tokens before, between and after the texts of a pair."""
        if self._encoder is None:
            probe = self._backend.encode("a", "a")
            ids, control = probe.ids, probe.special_tokens_mask
        else:
            ids, control = self._encoder.encode_pair("a", "a")
        parts: list[list[int]] = [[], [], []]
        place, inside = 0, False
        for token_id, is_control in zip(ids, control, strict=True):
            if is_control:
                parts[place].append(token_id)
            elif not inside:
                place += 1
            inside = not is_control
        if place == 1:  # nothing stands between them
            return parts[0], [], parts[1]
        if place != 2:
            raise ModelError("the tokenizer leaves out a text of a pair; use another reranker")
        return parts[0], parts[1], parts[2]

    def encode_filled(
        self, template: str, values: Mapping[str, str], *, add_special_tokens: bool
    ) -> list[int]:
        """Encode a template filled with texts; only the template can contain control tokens.

        Args:
            template: has `{name}` in place of each text.
            values: texts by name.

        Raises:
            RequestError: a text contains lone surrogates.
        """
        guard = ContentGuard(self._control_tokens)

        def fill(found: re.Match[str]) -> str:
            value = values.get(found[1])
            return found[0] if value is None else str(guard.hide(_valid(value)))

        text = re.sub(r"\{(\w+)\}", fill, template)
        occurrences = self._control_tokens.find(text)
        pieces = [guard.restore(piece) for piece in _split(text, occurrences)]
        return self._encode_pieces(pieces, occurrences, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        continues: str | None = None,
        salt: str = "",
        beside: Beside | None = None,
    ) -> list[int]:
        """Encode a chat in the model's format.

        Only the template can produce control tokens; messages stay text. Caches texts of recent
        chats; `salt` separates chats that must not learn of one another from timing.

        Args:
            continues: field of the last message, such as content, with whose text the chat ends.
            beside: texts to put before and behind control tokens.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses the messages.
            RequestError: a message nests too deeply or contains lone surrogates, or the template
                leaves out the text to continue.
        """
        check_nesting(messages, "messages")
        check_nesting(tools, "tools")
        check_nesting(options, "chat_template_kwargs")
        guard = ContentGuard(self._control_tokens)
        hidden = guard.hide(messages)
        mark = None if continues is None else marked_end(hidden[-1], continues)
        text = self._template().render(
            hidden,
            tools=guard.hide(tools),
            add_generation_prompt=add_generation_prompt and mark is None,
            options=guard.hide(options),
        )
        if mark is not None:
            text = text_before(mark, text)
        occurrences = self._control_tokens.find(_valid(text))
        pieces = [_valid(guard.restore(piece)) for piece in _split(text, occurrences)]
        pieces = self._with_texts(beside, pieces, occurrences)
        begin, *others = self._known_texts.ids_of(
            [pieces[0], *(self._separator + piece for piece in pieces[1:])], salt
        )
        ids = list(begin)
        for occurrence, piece in zip(occurrences, others, strict=True):
            ids.append(occurrence.token_id)
            ids.extend(piece[1:])
        return ids

    @cached_property
    def dialect(self) -> Dialect:
        """The model's format of thoughts and tool calls, learned from its chat template.

        Raises:
            ChatTemplateError: the model has no chat template.
        """
        template = self._template()
        assert self.chat_template is not None
        texts = [self.chat_template.source, self.chat_template.tool_source or ""]
        return learn_dialect(
            lambda messages, tools: template.render(messages, tools=tools), "\n".join(texts)
        )

    @cached_property
    def template_takes_pairs(self) -> bool:
        """True if the chat template is for a query and a document, as rerankers have one.

        Raises:
            ChatTemplateError: the template exceeds its limits on a short pair.
        """
        from appliance.tokenizer.isolation import TemplateLimitError

        pair = [{"role": role, "content": f"<{role}>"} for role in ("query", "document")]
        try:
            text = self._template().render(pair)
        except TemplateLimitError:
            raise
        except ChatTemplateError:
            return False
        return all(turn["content"] in text for turn in pair)

    def control_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are control tokens."""
        return frozenset(self.mark_ids(texts).values()) & self._control_ids

    def mark_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of texts that are tokens no other text contains, see `vocabulary`."""
        wanted = set(texts)
        return {
            text: token_id
            for token_id, text in self._added_text.items()
            if text in wanted and self._is_mark(token_id)
        }

    @property
    def is_isolated(self) -> bool:
        """True if another process encodes even short texts."""
        return self._encoder is not None

    def isolate_template(self) -> None:
        """Render chats in processes with limits from now on."""
        if self.chat_template is not None and self._isolated is None:
            from appliance.tokenizer.isolation import IsolatedTemplate

            self._isolated = IsolatedTemplate(self.chat_template)

    def try_template(self) -> None:
        """Isolate the template, render three short chats, and learn the dialect.

        Raises:
            ChatTemplateError: the template exceeds its limits on a short chat.
        """
        self.isolate_template()
        if self._isolated is None:
            return
        try:
            self._isolated.try_out()
            logger.debug("the dialect of the model: %s", self.dialect)
        finally:
            self._isolated.close()  # servers of plain completions need no template

    def rest(self) -> None:
        """End idle worker processes; the next text starts a new one."""
        for elsewhere in (self._isolated, self._encoder):
            if elsewhere is not None:
                elsewhere.rest()

    def close(self) -> None:
        """End the worker processes; the next text starts a new one."""
        for elsewhere in (self._isolated, self._encoder):
            if elsewhere is not None:
                elsewhere.close()

    def decode(self, token_ids: Iterable[int], *, with_control: bool = False) -> str:
        """Decode a whole sequence, by default without control tokens."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        if self._encoder is not None:  # whose decoder is not trusted either
            bytes_of = self.token_bytes if with_control else self.visible_bytes
            return b"".join(map(bytes_of, known)).decode("utf-8", errors="replace")
        text: str = self._backend.decode(known, skip_special_tokens=not with_control)
        return text

    def token_text(self, token_id: int) -> str:
        """Decode one token, control tokens included; U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, control tokens included; b"" outside the vocabulary."""
        if (cached := self._bytes.get(token_id)) is None:
            cached = self._bytes[token_id] = self._find_bytes(token_id)
        return cached

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """Return every token's bytes, and the ids of tokens that no text contains.

        The latter are control tokens and added ones spelled like them. Takes some tenths of a
        second for a large vocabulary.
        """
        tokens = [self._find_bytes(token_id) for token_id in range(self.vocab_size)]
        return tokens, list(filter(self._is_mark, self._added_text))

    def _is_mark(self, token_id: int) -> bool:
        is_control = token_id in self._control_ids
        return is_control or _CONTROL.fullmatch(self._added_text[token_id]) is not None

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to an answer; none for control tokens."""
        return b"" if token_id in self._control_ids else self.token_bytes(token_id)

    def _template(self) -> IsolatedTemplate | ChatTemplate:
        template = self._isolated or self.chat_template
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template; use completions with a prompt instead"
            )
        return template

    def _find_visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._control_ids else self._find_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else piece_bytes(piece, self._spelling)

    def _with_texts(
        self, beside: Beside | None, pieces: list[str], between: list[Occurrence]
    ) -> list[str]:
        """Return the texts around control tokens with what belongs beside these."""
        if not beside:
            return pieces
        texts = {token: beside[word] for word, token in self.mark_ids(beside).items()}
        for place, occurrence in enumerate(between):
            before, behind = texts.get(occurrence.token_id, ("", ""))
            pieces[place] += before
            pieces[place + 1] = behind + pieces[place + 1]
        return pieces

    def _encode_pieces(
        self, pieces: list[str], between: list[Occurrence], add_special_tokens: bool
    ) -> list[int]:
        """Encode texts with a control token between each two."""
        (ids,) = self._encode_texts([self._separator.join(pieces)], add_special_tokens)
        if not between:
            return ids
        control = iter(between)
        return [next(control).token_id if i == self._separator_id else i for i in ids]

    def _encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[list[int]]:
        if self._encoder is not None:
            return self._encoder.encode(texts, add_special_tokens)
        try:
            # Batches, even of one, release the GIL; a single text does not.
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # from Rust; cannot be imported
                raise
            raise RequestError("this model's tokenizer fails on this text") from error
        return [encoding.ids for encoding in encodings]


def _split(text: str, occurrences: list[Occurrence]) -> list[str]:
    starts = [0, *(occurrence.end for occurrence in occurrences)]
    ends = [*(occurrence.start for occurrence in occurrences), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _valid(text: str) -> str:
    """Return the text; raise RequestError if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}"
        ) from error
    return text


def _spelling(decoder: Any) -> Spelling:
    steps = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))
    if '"Regex"' in steps:  # it would run on every answer
        raise ModelError("the tokenizer's decoder has a regular expression; use another model")
    if '"ByteLevel"' in steps:
        return Spelling.BYTE_LEVEL
    if '"ByteFallback"' in steps or '"Metaspace"' in steps or "\\u2581" in steps:
        return Spelling.SENTENCEPIECE
    if '"WordPiece"' in steps:
        return Spelling.WORDPIECE
    raise ModelError(
        "the tokenizer is neither byte-level, SentencePiece nor WordPiece; "
        "use a model of a supported family"
    )
