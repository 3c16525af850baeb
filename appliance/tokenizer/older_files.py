"""Builds the tokenizers of folders without tokenizer.json.

Reads vocab.json with merges.txt, whose rules transformers' class has, SentencePiece's
tokenizer.model, and byte sequences by rank: Mistral's tekken.json and Kimi's tiktoken.model. The
lower a token's rank, the sooner two neighbours that make it up are merged. Others are refused by
name.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split

from appliance.errors import ModelError, UnsupportedModelError
from appliance.files import open_regular, read_whole
from appliance.tokenizer.from_gguf import MAX_SPLIT_CHARACTERS, SENTENCEPIECE, GGUFTokenizer
from appliance.tokenizer.known_parts import is_short_table
from appliance.tokenizer.pieces import SPACE_MARK, bytes_in_letters
from appliance.tokenizer.pre_tokenizers import KIMI, KNOWN_PATTERNS
from appliance.tokenizer.word_rules import WORD_RULES

VOCABULARY, MERGES, PIECES = "vocab.json", "merges.txt", "tokenizer.model"
TEKKEN, RANKS = "tekken.json", "tiktoken.model"
_OTHERS = {
    RANKS: "tiktoken's form, with rules that only its code has",
    "qwen.tiktoken": "tiktoken's form",
    "spiece.model": "SentencePiece's form of an encoder",
    "sentencepiece.bpe.model": "SentencePiece's form of an encoder",
    "vocab.txt": "WordPiece's form",
}
# How transformers' classes split words, by names of `word_rules`.
_RULES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "Qwen3_5Tokenizer": "qwen35"}
_RULES_BY_MODEL = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen"), "gpt-2"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "qwen2"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen35"),
}
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_DELIMITED, _FIXED32, _FIXED64, _VARINT = 2, 5, 1, 0  # wire types of Protocol Buffers
RESERVED = 256  # control tokens behind Kimi's ranks (tokenization_kimi.py)


@dataclass(frozen=True, slots=True)
class OlderTokenizer:
    """A tokenizer before the tokens of the small files are added.

    Attributes:
        roles: texts by role, such as bos_token.
        add_bos: texts begin with BOS unless the configuration says otherwise.
    """

    backend: Tokenizer
    roles: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False


def read_older_files(path: Path, config: Mapping[str, Any], model_type: str) -> OlderTokenizer:
    """Build a folder's tokenizer.

    Args:
        config: tokenizer_config.json.

    Raises:
        ModelError: there is none, or it is damaged.
        UnsupportedModelError: it is of another form; the message says what to do.
    """
    if (path / PIECES).is_file():
        return _from_pieces(path / PIECES, config)
    if (path / VOCABULARY).is_file() and (path / MERGES).is_file():
        return _from_merges(path, str(config.get("tokenizer_class", "")), model_type)
    if (path / TEKKEN).is_file():
        roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        return OlderTokenizer(read_tekken(path / TEKKEN), roles, add_bos=True)
    if (path / RANKS).is_file() and config.get("tokenizer_class") == "TikTokenTokenizer":
        named = {
            int(token_id): str(token["content"])
            for token_id, token in config.get("added_tokens_decoder", {}).items()
        }
        return OlderTokenizer(read_kimi(path / RANKS, named))
    found = next((name for name in _OTHERS if (path / name).is_file()), None)
    if found is None:
        raise ModelError(
            f"{path} has no tokenizer.json; add it (or {PIECES}, or {VOCABULARY} with {MERGES})"
        )
    raise _unsupported(path / found, f"is {_OTHERS[found]}")


def _unsupported(file: Path, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file} {reason}, and there is no tokenizer.json beside it; make one with transformers: "
        f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})"
    )


def _from_merges(path: Path, kind: str, model_type: str) -> OlderTokenizer:
    name = _RULES.get(kind.removesuffix("Fast")) if kind else _RULES_BY_MODEL.get(model_type)
    if name is None:
        what = f"tokenizer_class {kind!r}" if kind else f"model_type {model_type!r}"
        raise _unsupported(path / VOCABULARY, f"belongs to {what}, whose rules are unknown here")
    rules = WORD_RULES[name]
    try:
        for file in (VOCABULARY, MERGES):
            open_regular(path / file).close()
        backend = Tokenizer(BPE.from_file(str(path / VOCABULARY), str(path / MERGES)))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(
            f"{path / VOCABULARY} and {MERGES} are damaged: {error}; download them again"
        ) from error
    backend.pre_tokenizer = rules.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer()
    return OlderTokenizer(backend)


def _from_pieces(file: Path, config: Mapping[str, Any]) -> OlderTokenizer:
    """Read SentencePiece's model (sentencepiece_model.proto), as llama.cpp's converter does."""
    try:
        model = _message(read_whole(file))
        pieces = [_message(piece) for piece in model[1]]
        trainer, normalizer = _message(model[2][-1]), _message(model[3][-1])
        tokens = [piece[1][-1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, [bytes(4)])[-1])[0] for piece in pieces]
        types = [piece.get(3, [1])[-1] for piece in pieces]
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise _unsupported(file, "is not SentencePiece's form") from error
    if trainer.get(3, [_UNIGRAM])[-1] != _BPE:
        raise _unsupported(file, "is a model of likelihoods (Unigram)")
    ids = {
        "bos": trainer.get(41, [1])[-1],
        "eos": trainer.get(42, [2])[-1],
        "unknown": trainer.get(40, [0])[-1],
        "padding": trainer.get(43, [-1])[-1],
    }
    metadata: dict[str, Any] = {
        "model": SENTENCEPIECE,
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": bool(normalizer.get(3, [1])[-1]),
        **{f"{role}_token_id": _signed(token_id) for role, token_id in ids.items()},
    }
    source = GGUFTokenizer(
        file, {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    ).build()
    before: list[normalizers.Normalizer] = []
    if charsmap := normalizer.get(2, [b""])[-1]:
        if not is_short_table(charsmap):
            raise _unsupported(file, "writes single characters as long texts")
        before.append(normalizers.Precompiled(charsmap))
    if normalizer.get(4, [1])[-1]:
        edges = normalizers.Replace(Regex(r"\A | \z"), "")
        before += [normalizers.Replace(Regex(" {2,}"), " "), edges]
    backend = source.backend
    last = backend.normalizer
    if config.get("legacy") is False and metadata["add_space_prefix"]:
        last = normalizers.Replace(" ", SPACE_MARK)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE_MARK, prepend_scheme="first", split=False
        )
    backend.normalizer = normalizers.Sequence([*before, last])
    short = {"unknown": "unk", "padding": "pad"}
    roles = {
        f"{short.get(role, role)}_token": tokens[_signed(token_id)]
        for role, token_id in ids.items()
        if 0 <= _signed(token_id) < len(tokens)
    }
    return OlderTokenizer(backend, roles, add_bos=True)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _message(data: bytes) -> dict[int, list[Any]]:
    """Parse a message of Protocol Buffers: values by field; numbers, or bytes of all else."""
    found: dict[int, list[Any]] = {}
    for number, value in _fields(memoryview(data)):
        found.setdefault(number, []).append(value)
    return found


def _fields(data: memoryview) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _DELIMITED:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, bytes(data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")


class _Token(msgspec.Struct):
    token_bytes: str  # in base 64
    rank: int


class _Special(msgspec.Struct):
    token_str: str
    rank: int


class _Settings(msgspec.Struct):
    pattern: str
    default_vocab_size: int | None = None
    default_num_special_tokens: int | None = None


class _Tekken(msgspec.Struct):
    config: _Settings
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def read_tekken(file: Path) -> Tokenizer:
    """Build the tokenizer of a tekken.json; its control tokens come first.

    Raises:
        ModelError: it is damaged.
        UnsupportedModelError: it is older than its list of control tokens, or splits words by
            unknown rules.
    """
    try:
        found = msgspec.json.decode(read_whole(file), type=_Tekken)
    except msgspec.MsgspecError as error:
        raise _damaged(file, str(error)) from error
    settings, special = found.config, found.special_tokens
    if special is None:
        raise UnsupportedModelError(
            f"{file} has no special_tokens, as files of 2024 have none; use a newer file of the "
            "model, or one with tokenizer.json"
        )
    if settings.pattern not in KNOWN_PATTERNS:
        raise UnsupportedModelError(
            f"{file} splits words by the unknown pattern {settings.pattern!r:.80}; use a folder of "
            "the model with tokenizer.json"
        )
    contents = [one.token_str for one in sorted(special, key=lambda one: one.rank)]
    if sorted(one.rank for one in special) != list(range(len(special))):
        raise _damaged(file, "the ranks of special_tokens are not 0, 1, 2 and so on")
    count = settings.default_num_special_tokens or len(contents)
    contents += [f"<SPECIAL_{index}>" for index in range(len(contents), count)]
    size = settings.default_vocab_size
    used = found.vocab[: None if size is None else max(0, size - count)]
    ranked = [_decoded(file, one.token_bytes) for one in sorted(used, key=lambda one: one.rank)]
    return _build(file, ranked, settings.pattern, contents, first=count)


def read_kimi(file: Path, named: dict[int, str]) -> Tokenizer:
    """Build the tokenizer of Kimi's tiktoken.model; its control tokens come last.

    Args:
        named: control tokens by id; the others are reserved.

    Raises:
        ModelError: it is damaged.
    """
    ranks: dict[bytes, int] = {}
    for line in read_whole(file).splitlines():
        encoded, _, rank = line.partition(b" ")
        if not rank.isdigit():
            raise _damaged(file, f"{line!r:.40} is no token with its rank")
        ranks[_decoded(file, encoded.decode("ascii", "replace"))] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise _damaged(file, "its ranks are not 0, 1, 2 and so on")
    ids = range(len(ranks), len(ranks) + RESERVED)
    contents = [named.get(index, f"<|reserved_token_{index}|>") for index in ids]
    return _build(file, sorted(ranks, key=ranks.__getitem__), KIMI, contents, first=0)


def _build(
    file: Path, ranked: Sequence[bytes], pattern: str, control: Sequence[str], *, first: int
) -> Tokenizer:
    """Build a tokenizer whose ranks begin at id `first`."""
    if (total := sum(len(token) ** 2 for token in ranked)) > MAX_SPLIT_CHARACTERS:
        raise _damaged(
            file,
            f"the squares of its tokens' lengths sum up to {total}, where {MAX_SPLIT_CHARACTERS} "
            "are accepted",
        )
    letters = {token: bytes_in_letters(token) for token in ranked}
    vocabulary: dict[str, int] = {letters[token]: first + rank for rank, token in enumerate(ranked)}
    merges: list[tuple[str, str]] = []
    for token in ranked:
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(letters[a], letters[b]) for a, b in splits if a in letters and b in letters]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    begin = 0 if first else len(ranked)
    vocabulary |= {content: begin + index for index, content in enumerate(control)}
    backend = Tokenizer(_model(file, vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(content, normalized=False) for content in control])
    return backend


def _model(file: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    try:
        return BPE(vocabulary, merges, ignore_merges=True)
    except Exception as error:  # the library raises nothing more specific
        raise _damaged(file, str(error)) from error


def _decoded(file: Path, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _damaged(file, f"{text!r:.40} is not in base 64") from error


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is damaged: {reason}; download it again")
