"""Builds tokenizers from byte sequences by rank: Mistral's tekken.json and Kimi's tiktoken.model.

The lower a token's rank, the sooner two neighbours that make it up are merged.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split

from appliance.errors import ModelError, UnsupportedModelError
from appliance.files import read_whole
from appliance.tokenizer.from_gguf import MAX_SPLIT_CHARACTERS
from appliance.tokenizer.pieces import bytes_in_letters
from appliance.tokenizer.pre_tokenizers import KIMI, KNOWN_PATTERNS

RESERVED = 256  # control tokens behind Kimi's ranks (tokenization_kimi.py)


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
