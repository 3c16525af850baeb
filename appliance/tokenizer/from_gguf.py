"""Builds a tokenizer from a GGUF file's metadata."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from appliance.errors import ModelError, UnsupportedModelError
from appliance.gguf import read_header
from appliance.retrieval_recipe import recipe_of_gguf
from appliance.sampling_defaults import SamplingDefaults
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.pieces import SPACE_MARK
from appliance.tokenizer.pre_tokenizers import WORD_RULES
from appliance.tokenizer.source import END_OF_TURN, TokenizerSource, with_end_of_turn

T = TypeVar("T")

# Limit on the work of splitting all pieces: the sum of their squared lengths. Gemma 3, with the
# largest vocabulary in use, has 11 million.
MAX_SPLIT_CHARACTERS = 2**27

# Kinds of tokenizers, `tokenizer.ggml.model`: of bytes, and SentencePiece's.
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of token_type

# Names that converters give to the values of generation_config.json.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

# Phi-3 swallows white space after its control tokens, except these; the file does not say so.
_PHI3_KEEPS_SPACE = frozenset({"<s>", "<unk>", "<|endoftext|>"})


def load_from_gguf(path: Path) -> TokenizerSource:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ModelError: the file has no tokenizer, or an inconsistent one.
        UnsupportedModelError: the kind of tokenizer is unknown.
    """
    return _GGUFTokenizer(path, read_header(path).metadata).build()


class _GGUFTokenizer:
    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._kind = self._get("model", str, "")
        if not self._kind:
            raise ModelError(f"{path} holds no tokenizer; use a GGUF file of a whole model")
        self._tokens: list[str] = self._strings("tokens")
        self._types: list[int] = self._get("token_type", list, [_NORMAL] * len(self._tokens))
        if len(self._types) != len(self._tokens):
            raise self._damaged(f"{len(self._tokens)} tokens but {len(self._types)} token types")

    def build(self) -> TokenizerSource:
        try:
            if self._kind == BYTE_LEVEL:
                backend, add_bos = self._byte_level()
            elif self._kind == SENTENCEPIECE:
                backend, add_bos = self._sentencepiece()
            else:
                raise UnsupportedModelError(
                    f"{self._path} has a tokenizer of kind {self._kind!r}; "
                    "supported are gpt2 and llama"
                )
            self._add_tokens(backend)
            self._add_bos_and_eos(backend, add_bos)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._damaged(str(error)) from error
        named = [self._token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        return TokenizerSource(
            backend=backend,
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_ids=with_end_of_turn(backend, named),
            chat_template=self._chat_template(),
            sampling=SamplingDefaults.read(
                {name: self._metadata.get(key) for name, key in _SAMPLING.items()},
                f"the metadata of {self._path.name}",
            ),
            retrieval=recipe_of_gguf(self._metadata, self._path.name),
        )

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        name = self._get("pre", str, "default")
        if name not in WORD_RULES:
            raise UnsupportedModelError(
                f"{self._path} splits words by the unknown rules {name!r}; use the model's "
                f"Hugging Face folder instead. Known rules: {', '.join(WORD_RULES)}"
            )
        rules = WORD_RULES[name]
        merges = [self._pair(merge) for merge in self._strings("merges")]
        backend = Tokenizer(self._bpe(self._tokens, merges, ignore_merges=rules.ignore_merges))
        backend.pre_tokenizer = rules.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        if rules.normalizer is not None:
            backend.normalizer = rules.normalizer()
        return backend, rules.add_bos

    def _sentencepiece(self) -> tuple[Tokenizer, bool]:
        # Runs of spaces are user-defined tokens in some files; text has the mark instead.
        pieces = [SPACE_MARK * len(t) if t and not t.strip(" ") else t for t in self._tokens]
        unknown = self._token_id("unknown_token_id")
        model = self._bpe(
            pieces,
            self._merges_by_score(pieces),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(model)
        add_space = self._get("add_space_prefix", bool, True)
        mark_spaces = normalizers.Replace(" ", SPACE_MARK)
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces])
            if add_space
            else mark_spaces
        )
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", 1, 0)] if add_space else steps
        )
        return backend, True

    def _merges_by_score(self, pieces: list[str]) -> list[tuple[str, str]]:
        """List every split of a piece into two others, likeliest piece first.

        SentencePiece merges by score and keeps no list of pairs. Its vocabularies are ordered by
        score; where a file breaks the order, user-defined tokens have arbitrary scores. So position
        is the better rank.
        """
        if (total := sum(len(piece) ** 2 for piece in pieces)) > MAX_SPLIT_CHARACTERS:
            raise self._damaged(
                f"its tokens have up to {max(map(len, pieces))} characters, {total} by the sum of "
                f"their squares where {MAX_SPLIT_CHARACTERS} are accepted"
            )
        known = set(pieces)
        order: list[str] = pieces
        scores = self._get("scores", list, [])
        if len(scores) == len(pieces) and not self._ordered_by_score(scores):
            ranked = sorted(range(len(pieces)), key=lambda index: -scores[index])
            order = [pieces[index] for index in ranked]
        merges = []
        for piece in order:
            for at in range(len(piece) - 1, 0, -1):
                if (left := piece[:at]) in known and (right := piece[at:]) in known:
                    merges.append((left, right))
        return merges

    def _ordered_by_score(self, scores: list[float]) -> bool:
        normal = [s for s, kind in zip(scores, self._types, strict=True) if kind == _NORMAL]
        return all(a >= b for a, b in pairwise(normal))

    def _bpe(
        self, pieces: list[str], merges: list[tuple[str, str]], **options: bool | str | None
    ) -> BPE:
        # The first id of a repeated piece wins.
        last_first = range(len(pieces) - 1, -1, -1)
        vocabulary = dict(zip(reversed(pieces), last_first, strict=True))
        try:
            return BPE(vocabulary, merges, **options)
        except Exception as error:  # the library raises nothing more specific
            raise self._damaged(str(error)) from error

    def _add_tokens(self, backend: Tokenizer) -> None:
        swallow_space = self._kind == SENTENCEPIECE and self._architecture() == "phi3"
        control, user_defined = [], []
        for content, kind in zip(self._tokens, self._types, strict=True):
            # Some files mark the end of a turn as user-defined, so answers would show it.
            if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and content in END_OF_TURN):
                rstrip = swallow_space and content not in _PHI3_KEEPS_SPACE
                control.append(AddedToken(content, normalized=False, special=True, rstrip=rstrip))
            elif kind == _USER_DEFINED and backend.token_to_id(content) is not None:
                user_defined.append(AddedToken(content, normalized=False, special=False))
        backend.add_special_tokens(control)
        backend.add_tokens(user_defined)

    def _add_bos_and_eos(self, backend: Tokenizer, add_bos: bool) -> None:
        bos = self._token_id("bos_token_id") if self._get("add_bos_token", bool, add_bos) else None
        eos = self._token_id("eos_token_id") if self._get("add_eos_token", bool, False) else None
        before = [] if bos is None else [(self._tokens[bos], bos)]
        after = [] if eos is None else [(self._tokens[eos], eos)]
        backend.post_processor = processors.TemplateProcessing(
            single=[*(content for content, _ in before), "$A", *(content for content, _ in after)],
            special_tokens=before + after,
        )

    def _chat_template(self) -> ChatTemplate | None:
        source = self._metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            return None
        tool_source = self._metadata.get("tokenizer.chat_template.tool_use")
        variables = {}
        for name in ("bos", "eos", "unknown", "padding"):
            token_id = self._token_id(f"{name}_token_id")
            if token_id is not None:
                short = {"unknown": "unk", "padding": "pad"}.get(name, name)
                variables[f"{short}_token"] = self._tokens[token_id]
        return ChatTemplate(
            source, variables, tool_source=tool_source if isinstance(tool_source, str) else None
        )

    def _architecture(self) -> str:
        return str(self._metadata.get("general.architecture", ""))

    def _token_id(self, key: str) -> int | None:
        token_id = self._get(key, int, -1)
        if token_id >= len(self._tokens):
            raise self._damaged(f"{key} is {token_id}, but there are {len(self._tokens)} tokens")
        return token_id if token_id >= 0 else None

    def _strings(self, key: str) -> list[str]:
        values = self._get(key, list, [])
        if not values or not isinstance(values[0], str):
            raise self._damaged(f"it has no {key}")
        return values

    def _pair(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not space:
            raise self._damaged(f"merge {merge!r} is not a pair")
        return left, right

    def _get(self, key: str, kind: type[T], default: T) -> T:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, kind):
            raise self._damaged(f"{key} is {value!r:.40}")
        return value

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(
            f"the tokenizer in {self._path} is damaged: {reason}; download the file again"
        )
