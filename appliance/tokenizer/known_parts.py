"""Finds parts of a tokenizer.json whose time and memory are not known to grow as texts do.

Known are the types of the tokenizers library, with values as models have them: a rule that doubles
a text is harmless once and takes all memory 40 times in a row. What is unknown encodes in a process
with limits, see `isolation`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from appliance.tokenizer import pre_tokenizers

MAX_STEPS = 32  # of one kind, one after another
MAX_GROWTH = 64  # times a text's length, by all replacements together
MAX_TEXT = 16  # characters of a prefix, a suffix or a replacement
MAX_EXPANSION = 64  # bytes for one character in a SentencePiece table
MAX_PIECE = 256  # characters of a piece that a Unigram model looks for from each character
MAX_WORD = 200  # characters of a word that WordPiece divides, in quadratic time
MAX_FORMS = 3  # Unicode forms and tables, each of which can write a character as several
MAX_FRAME = 16  # control tokens around a text
_INNER = {  # the steps of a sequence, by its place
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 100


class _Rules(msgspec.Struct):
    """A tokenizer.json without its vocabulary."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    model: _Model = msgspec.field(default_factory=_Model)


_decode = msgspec.json.Decoder(_Rules).decode  # made here: models load in several threads


def unknown_parts(tokenizer_json: bytes) -> list[str]:
    """Name a tokenizer's parts that are not known to be harmless.

    Empty for a damaged file: reading it raises the error.
    """
    try:
        rules = _decode(tokenizer_json)
        steps = {name: list(_flat(getattr(rules, name), key)) for name, key in _INNER.items()}
        found = [
            f"{name} {str(step.get('type'))[:40]}"
            for name, several in steps.items()
            for step in several
            if not _is_known(name, step)
        ]
        found += [f"{name} of {len(s)} steps" for name, s in steps.items() if len(s) > MAX_STEPS]
        written = steps["normalizer"] + steps["pre_tokenizer"]
        if _count(written, "ByteLevel") > 2 or _count(steps["pre_tokenizer"], "ByteLevel") > 1:
            found.append("ByteLevel, more than once")
        if _count(written, "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Precompiled") > MAX_FORMS:
            found.append("Unicode forms, one after another")
        if any(_growth(steps[name]) > MAX_GROWTH for name in ("normalizer", "decoder")):
            found.append("replacements that grow")
        if not _is_known_model(rules.model):
            found.append(f"model {str(rules.model.type)[:40]}")
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError) as error:
        return [f"form ({error})"]
    except (msgspec.DecodeError, RecursionError):
        return []
    return found


def is_short_table(table: bytes) -> bool:
    """Return True if a SentencePiece table writes no character as a long text.

    Args:
        table: the length of a trie, the trie, and texts that it points into, each with a zero byte
            at its end (SentencePiece's `normalizer.cc`).
    """
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0"))) <= MAX_EXPANSION


def _flat(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a sequence, however they are nested."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for one in step[inner]:
            yield from _flat(one, inner)
    else:
        yield step


def _count(steps: list[dict[str, Any]], *types: str) -> int:
    return sum(step.get("type") in types for step in steps)


def _growth(steps: list[dict[str, Any]]) -> float:
    """Return how many times longer replacements can make a text, all together."""
    growth = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            # An expression matches one character or more.
            pattern = step["pattern"].get("String") or "x"
            growth *= max(1.0, len(step["content"]) / len(pattern))
    return growth


def _is_known(place: str, step: dict[str, Any]) -> bool:
    kind = step.get("type")
    known = _KNOWN[place].get(kind) if isinstance(kind, str) else None
    return known is not None and known(step)


def _always(step: dict[str, Any]) -> bool:
    return True


def _short(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return a test that these values are short texts, if they are there."""
    return lambda step: all(_is_short(step.get(name) or "") for name in names)


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _matches_known(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return False
    if "Regex" in pattern:
        return pattern["Regex"] in pre_tokenizers.KNOWN_PATTERNS
    return isinstance(pattern.get("String"), str) and bool(pattern["String"])


def _replaces(step: dict[str, Any]) -> bool:
    return _matches_known(step) and _is_short(step.get("content"))


def _expands_little(step: dict[str, Any]) -> bool:
    try:
        table = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return False
    return is_short_table(table)


def _frames(step: dict[str, Any]) -> bool:
    """Return True if a template has each text once and a few control tokens."""
    for name in ("single", "pair"):
        pieces = step.get(name)
        if not isinstance(pieces, list) or len(pieces) > MAX_FRAME:
            return False
        texts = [piece["Sequence"].get("id") for piece in pieces if "Sequence" in piece]
        if len(set(texts)) < len(texts):
            return False
    tokens = step.get("special_tokens")
    return isinstance(tokens, dict) and all(len(one["ids"]) <= 4 for one in tokens.values())


def _is_known_model(model: _Model) -> bool:
    if model.dropout or not all(
        _is_short(text or "")
        for text in (model.continuing_subword_prefix, model.end_of_word_suffix)
    ):
        return False
    if model.type == "Unigram":
        pieces = msgspec.json.decode(model.vocab, type=list[tuple[str, float]])
        return max((len(piece) for piece, _ in pieces), default=0) <= MAX_PIECE
    known = model.type in (None, "BPE", "WordLevel", "WordPiece")
    return known and model.max_input_chars_per_word <= MAX_WORD


_KNOWN: dict[str, dict[str, Callable[[dict[str, Any]], bool]]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Nmt"), _always),
        **dict.fromkeys(("StripAccents", "BertNormalizer", "ByteLevel"), _always),
        "Prepend": _short("prepend"),
        "Precompiled": _expands_little,
        "Replace": _replaces,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits"), _always),
        **dict.fromkeys(("FixedLength", "Punctuation", "UnicodeScripts"), _always),
        **dict.fromkeys(("Whitespace", "WhitespaceSplit"), _always),
        "Metaspace": _short("replacement", "str_rep"),
        "Split": _matches_known,
    },
    "post_processor": {
        **dict.fromkeys(("BertProcessing", "ByteLevel", "RobertaProcessing"), _always),
        "TemplateProcessing": _frames,
    },
    "decoder": {
        **dict.fromkeys(("ByteFallback", "ByteLevel", "Fuse", "Strip"), _always),
        "BPEDecoder": lambda step: bool(step.get("suffix")) and _is_short(step["suffix"]),
        "CTC": _short("pad_token", "word_delimiter_token"),
        "Metaspace": _short("replacement", "str_rep"),
        "Replace": _replaces,
        "WordPiece": _short("prefix"),
    },
}
