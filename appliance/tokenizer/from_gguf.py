"""Builds a tokenizer from a GGUF file's metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from appliance.errors import ModelError, UnsupportedModelError
from appliance.gguf import read_header
from appliance.model_files.retrieval_recipe import RetrievalRecipe, recipe_of_gguf
from appliance.model_files.sampling_defaults import SamplingDefaults
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.pieces import SPACE_MARK
from appliance.tokenizer.source import END_OF_TURN, TokenizerSource, with_end_of_turn
from appliance.tokenizer.word_rules import UNNAMED, WORD_RULES, WordRules, recovered_name

T = TypeVar("T")

# Limit on the work of splitting all pieces: the sum of their squared lengths. Gemma 3, with the
# largest vocabulary in use, has 11 million.
MAX_SPLIT_CHARACTERS = 2**27

# Kinds of tokenizers, `tokenizer.ggml.model`: of bytes, SentencePiece's, and Gemma 4's, which has
# SentencePiece's pieces with merges beside them; of encoders, WordPiece and XLM-R's Unigram.
BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"
WORDPIECE, UNIGRAM = "bert", "t5"
# Names of rules in files of bytes that make them files of Gemma 4's kind.
_GEMMA4_RULES = ("gemma4", "granite-embed-multi-311m")
MARKED_SPACES = (*_GEMMA4_RULES, "sarvam-moe")

_OTHER_KINDS = {
    "rwkv": "RWKV's",
    "plamo2": "PLaMo 2's",
    "hybriddna": "of DNA sequences",
    "whitespace": "of whole words, of an encoder",
}

_PREFIX = "tokenizer.ggml."
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LONG = {"sep": "seperator"}  # as GGUF spells it
# What llama.cpp takes where the file names no usable token.
_USUAL_IDS = {
    SENTENCEPIECE: {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    WORDPIECE: {"bos_token_id": 101, "unknown_token_id": 100, "seperator_token_id": 102},
}
_CONTROL_OF_BERT = {
    "bos_token_id": "[CLS]",
    "unknown_token_id": "[UNK]",
    "seperator_token_id": "[SEP]",
}
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
    return GGUFTokenizer(path, read_header(path).metadata).build()


class GGUFTokenizer:
    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._notes: list[str] = []
        self._kind = self._get("model", str, "none")
        if self._kind in ("none", "no_vocab"):
            raise ModelError(f"{path} holds no tokenizer; use a GGUF file of a whole model")
        self._rules_name = self._get("pre", str, "")
        if self._kind == BYTE_LEVEL and self._rules_name in MARKED_SPACES:
            self._kind = GEMMA4
        elif self._kind == GEMMA4:
            self._rules_name = GEMMA4
        if self._kind not in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4, WORDPIECE, UNIGRAM):
            known = _OTHER_KINDS.get(self._kind)
            described = f" ({known})" if known else ""
            raise UnsupportedModelError(
                f"{path} has a tokenizer of kind {self._kind!r:.40}{described}; "
                "supported are gpt2, llama, gemma4, bert and t5: use the model's Hugging Face "
                "folder instead"
            )
        # An encoder's first token, under its own name in older files.
        if (first := metadata.get(f"{_PREFIX}cls_token_id")) is not None:
            self._metadata = {f"{_PREFIX}bos_token_id": first, **metadata}
        self._tokens: list[str] = self._strings("tokens")
        self._types: list[int] = self._get("token_type", list, [_NORMAL] * len(self._tokens))
        if len(self._types) < len(self._tokens):
            raise self._damaged(f"{len(self._tokens)} tokens but {len(self._types)} token types")
        self._types = self._types[: len(self._tokens)]  # llama.cpp takes more of them, too
        if self._kind == WORDPIECE:
            named = {
                _PREFIX + key: self._tokens.index(content)
                for key, content in _CONTROL_OF_BERT.items()
                if content in self._tokens
            }
            self._metadata = named | self._metadata
        self._ids = {
            key: self._find_token_id(key)
            for key in self._metadata_keys() | _USUAL_IDS.get(self._kind, {}).keys()
        }

    def build(self) -> TokenizerSource:
        try:
            backend = self._backend()
            self._add_tokens(backend)
            self._add_bos_and_eos(backend)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._damaged(str(error)) from error
        named = [self._ids.get(key) for key in _ENDS]
        return TokenizerSource(
            backend=backend,
            bos_token_id=self._ids.get("bos_token_id"),
            eos_token_ids=with_end_of_turn(backend, named),
            chat_template=self._chat_template(),
            sampling=SamplingDefaults.read(
                {name: self._metadata.get(key) for name, key in _SAMPLING.items()},
                f"the metadata of {self._path.name}",
            ),
            retrieval=self._retrieval(),
            notes=tuple(self._notes),
        )

    def _backend(self) -> Tokenizer:
        if self._kind == WORDPIECE:
            return self._wordpiece()
        if self._kind == UNIGRAM:
            return self._unigram()
        return self._byte_level() if self._kind == BYTE_LEVEL else self._sentencepiece()

    def _wordpiece(self) -> Tokenizer:
        """Build BERT's tokenizer; in the file a mark begins a word instead of continuing it."""
        typed = zip(self._tokens, self._types, strict=True)
        self._tokens = [
            token
            if kind == _CONTROL or not token
            else token[1:]
            if token[0] == SPACE_MARK
            else f"##{token}"
            for token, kind in typed
        ]
        unknown = self._ids.get("unknown_token_id")
        if unknown is None:
            raise self._damaged("it has no unknown token")
        # Files that say nothing of capitals: a vocabulary without any is of words in lower case.
        words = (t for t, kind in zip(self._tokens, self._types, strict=True) if kind == _NORMAL)
        cased = any(re.search("[A-Z]", token) for token in words if token[:1] != "[")
        lowercase = self._get("normalizer.lowercase", bool, not cased)
        backend = Tokenizer(WordPiece(self._by_id(), unk_token=self._tokens[unknown]))
        backend.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=self._get("normalizer.strip_accents", bool, lowercase),
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        return backend

    def _unigram(self) -> Tokenizer:
        """Build XLM-R's tokenizer, which splits at white space first."""
        scores = self._get("scores", list, [])
        if len(scores) != len(self._tokens):
            raise self._damaged(f"{len(self._tokens)} tokens but {len(scores)} scores")
        backend = Tokenizer(
            Unigram(
                list(zip(self._tokens, scores, strict=True)),
                unk_id=self._ids.get("unknown_token_id"),
                byte_fallback=False,
            )
        )
        if rules := self._get("precompiled_charsmap", list, []):
            backend.normalizer = normalizers.Precompiled(bytes(rule & 0xFF for rule in rules))
        scheme = "always" if self._get("add_space_prefix", bool, True) else "never"
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
        )
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return backend

    def _by_id(self) -> dict[str, int]:
        # The first id of a repeated piece wins.
        last_first = range(len(self._tokens) - 1, -1, -1)
        return dict(zip(reversed(self._tokens), last_first, strict=True))

    def _byte_level(self) -> Tokenizer:
        rules = self._word_rules
        backend = Tokenizer(
            self._bpe(self._tokens, self._merges(), ignore_merges=rules.ignore_merges)
        )
        backend.pre_tokenizer = rules.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        if rules.normalizer is not None:
            backend.normalizer = rules.normalizer()
        return backend

    @cached_property
    def _word_rules(self) -> WordRules:
        name = self._rules_name
        if name in ("", UNNAMED):
            recovered = recovered_name(self._tokens)
            if recovered is not None:
                self._notes.append(
                    f"{self._path.name} names no rules to split words (tokenizer.ggml.pre); those "
                    f"of its vocabulary are used, {recovered!r:.40}"
                )
            else:
                self._notes.append(
                    f"{self._path.name} names no rules to split words (tokenizer.ggml.pre), and "
                    "its tokens tell none: texts are split by llama.cpp's usual rules, which may "
                    "make answers worse; use a newer file of this model"
                )
            name = recovered or UNNAMED
        if name not in WORD_RULES:
            raise UnsupportedModelError(
                f"{self._path} splits words by the unknown rules {name!r:.40}; use the model's "
                f"Hugging Face folder instead. Known rules: {', '.join(WORD_RULES)}"
            )
        return WORD_RULES[name]

    def _sentencepiece(self) -> Tokenizer:
        # Runs of spaces are user-defined tokens in some files; text has the mark instead.
        pieces = [SPACE_MARK * len(t) if t and not t.strip(" ") else t for t in self._tokens]
        unknown = self._ids.get("unknown_token_id")
        model = self._bpe(
            pieces,
            self._merges() if self._kind == GEMMA4 else self._merges_by_score(pieces),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(model)
        add_space = self._kind == SENTENCEPIECE and self._get("add_space_prefix", bool, True)
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
        return backend

    def _merges(self) -> list[tuple[str, str]]:
        typed = zip(self._tokens, self._types, strict=True)
        in_bytes = all(len(token) <= 1 for token, kind in typed if kind == _NORMAL)
        if in_bytes and not self._get("merges", list, []):
            return []
        return [self._pair(merge) for merge in self._strings("merges")]

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
        named = {self._ids.get(key) for key in ("bos_token_id", *_ENDS)}
        for token_id, (content, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            # Some files give an end another type, or name no types, so answers would show it.
            is_control = content in END_OF_TURN or (
                token_id in named and content[:1] == "<" and content[-1:] == ">"
            )
            if kind in (_CONTROL, _UNKNOWN) or is_control:
                rstrip = swallow_space and content not in _PHI3_KEEPS_SPACE
                control.append(AddedToken(content, normalized=False, special=True, rstrip=rstrip))
            elif kind == _USER_DEFINED and backend.token_to_id(content) is not None:
                user_defined.append(AddedToken(content, normalized=False, special=False))
        backend.add_special_tokens(control)
        backend.add_tokens(user_defined)

    def _add_bos_and_eos(self, backend: Tokenizer) -> None:
        add_bos, add_sep = self._kind != BYTE_LEVEL and self._rules_name != "sarvam-moe", False
        if self._kind == BYTE_LEVEL:
            add_bos, add_sep = self._word_rules.add_bos, self._word_rules.add_sep
        usual_eos = self._kind == UNIGRAM
        add_bos = self._get("add_bos_token", bool, add_bos)
        if self._rules_name in _GEMMA4_RULES:
            add_bos = True  # early files deny it wrongly
        ends = [
            name
            for name, usual in (("eos", usual_eos), ("sep", add_sep))
            if self._get(f"add_{name}_token", bool, usual)
        ]
        if self._kind == WORDPIECE:  # whatever the file says of them, as in llama.cpp
            add_bos, ends = True, ["sep"]
        before = self._named(["bos"] if add_bos else [])
        after = list(dict.fromkeys(self._named(ends)))  # both are one token in encoders' files
        first, last = ([content for content, _ in names] for names in (before, after))
        # A pair as BERT has it, and XLM-R, which ends the first text and begins the second.
        middle = last * 2 if self._kind == UNIGRAM else last
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *middle, "$B:1", *(f"{content}:1" for content in last)],
            special_tokens=list(dict.fromkeys(before + after)),
        )

    def _named(self, names: Iterable[str]) -> list[tuple[str, int]]:
        ids = (self._ids.get(f"{_LONG.get(name, name)}_token_id") for name in names)
        return [(self._tokens[token_id], token_id) for token_id in ids if token_id is not None]

    def _chat_template(self) -> ChatTemplate | None:
        source = self._metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            return None
        tool_source = self._metadata.get("tokenizer.chat_template.tool_use")
        variables = {
            f"{short}_token": self._tokens[token_id]
            for short, name in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (token_id := self._ids.get(f"{name}_token_id")) is not None
        }
        return ChatTemplate(
            source, variables, tool_source=tool_source if isinstance(tool_source, str) else None
        )

    def _retrieval(self) -> RetrievalRecipe:
        recipe = recipe_of_gguf(self._metadata, self._path)
        if self._architecture() == "gemma-embedding" and not recipe.embedding.dense:
            self._notes.append(
                f"{self._path.name} lacks EmbeddingGemma's last linears (dense_2, dense_3), so its "
                "vectors are not those of the folder; llama.cpp's converter writes them with "
                "--sentence-transformers-dense-modules"
            )
        return recipe

    def _architecture(self) -> str:
        return str(self._metadata.get("general.architecture", ""))

    def _metadata_keys(self) -> set[str]:
        names = (key.removeprefix(_PREFIX) for key in self._metadata if key.startswith(_PREFIX))
        return {name for name in names if name.endswith("_token_id")}

    def _find_token_id(self, key: str) -> int | None:
        """Return the id under a key; note one that is no token, as llama.cpp does."""
        usual = _USUAL_IDS.get(self._kind, {}).get(key)
        usual = usual if usual is not None and usual < len(self._tokens) else None
        token_id = self._get(key, int, -1)
        if 0 <= token_id < len(self._tokens):
            return token_id
        instead = (
            "" if usual is None else f"; {self._tokens[usual]!r:.40} is taken, as llama.cpp does"
        )
        if _PREFIX + key in self._metadata:
            self._notes.append(
                f"{_PREFIX}{key} is {token_id}, but there are {len(self._tokens)} tokens{instead}"
            )
        elif key != "unknown_token_id":
            self._notes.append(f"{self._path.name} has no {_PREFIX}{key}{instead}")
        return usual

    def _strings(self, key: str) -> list[str]:
        values = self._get(key, list, [])
        if not values or not isinstance(values[0], str):
            raise self._damaged(f"it has no {key}")
        return values

    def _pair(self, merge: str) -> tuple[str, str]:
        at = merge.find(" ", 1)
        if at < 0:
            raise self._damaged(f"merge {merge!r:.40} is not a pair")
        return merge[:at], merge[at + 1 :]

    def _get(self, key: str, kind: type[T], default: T) -> T:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, kind):
            raise self._damaged(f"{key} is {value!r:.40}")
        return value

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(
            f"the tokenizer in {self._path} is damaged: {reason}; download the file again"
        )
