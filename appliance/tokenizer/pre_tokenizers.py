"""Word-splitting rules by GGUF name, and regular expressions known to be safe.

An unknown expression can take hours on a short text. The known ones take linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+CONTRACTION"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*CONTRACTION"
    r"|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("CONTRACTION", "").replace("NUMBER", r"\p{N}")
_GPT4O = _CASED.replace("CONTRACTION", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(
    "NUMBER", r"\p{N}{1,3}"
)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_POSSESSIVE = (  # Phi-4's spelling of GPT-4's
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# As in the tokenizer.json of models in use.
KNOWN_PATTERNS = frozenset(
    {
        *(_LLAMA3, _QWEN2, _TEKKEN, _GPT4O, _GPT2, _POSSESSIVE, _DEEPSEEK3),
        *(r"\p{N}", r"\p{N}{1,3}", r"\s?\p{L}+", r"\s?\p{P}+", r"[\r\n]", r"\d", r"[0-9]"),
        *(r" {2,}", r"\s+", r"\n", r" ", r"[0-9][0-9][0-9]"),
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # DeepSeek 3
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",  # DeepSeek 1 and 2
    }
)


class _Rules(msgspec.Struct):
    """The text-splitting parts of a tokenizer.json, without the vocabulary."""

    normalizer: Any = None
    pre_tokenizer: Any = None


def unknown_patterns(tokenizer_json: bytes) -> list[str]:
    """List a tokenizer's regular expressions that are not known to be safe.

    Empty for a damaged file: reading it raises the error.
    """
    try:
        rules = msgspec.json.decode(tokenizer_json, type=_Rules)
    except (msgspec.MsgspecError, RecursionError):
        return []
    found = _patterns([rules.normalizer, rules.pre_tokenizer])
    return [pattern for pattern in found if pattern not in KNOWN_PATTERNS]


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        pattern = value.get("Regex")
        if isinstance(pattern, str):
            yield pattern
        for item in value.values():
            yield from _patterns(item)
    elif isinstance(value, list):
        for item in value:
            yield from _patterns(item)


@dataclass(frozen=True, slots=True)
class WordRules:
    """Rules that prepare text for byte-pair merges.

    Attributes:
        pre_tokenizer: makes the splitter.
        ignore_merges: keep a word whole if the vocabulary has it.
        add_bos: a prompt begins with BOS unless the file says otherwise.
        normalizer: makes the normalizer, if there is one.
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _by_regex(pattern: str) -> Callable[[], PreTokenizer]:
    return lambda: Sequence(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3_RULES = WordRules(_by_regex(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_RULES = WordRules(_by_regex(_QWEN2), normalizer=normalizers.NFC)

WORD_RULES: dict[str, WordRules] = {
    "default": WordRules(_gpt2),  # old files without the name
    "gpt-2": WordRules(_gpt2),
    "smollm": WordRules(_single_digits),
    "llama-bpe": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
    "tekken": WordRules(_by_regex(_TEKKEN), ignore_merges=True, add_bos=True),  # Mistral Nemo
    "dbrx": WordRules(_by_regex(_LLAMA3)),  # Phi-4
    "gpt-4o": WordRules(_by_regex(_GPT4O)),  # Phi-4 mini
}
