"""How byte-level vocabularies split text into words, by the name that GGUF files give it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class WordRules:
    """What happens to text before byte pairs are merged.

    Attributes:
        pre_tokenizer: makes the splitter.
        ignore_merges: a word that is in the vocabulary is taken whole.
        add_bos: whether a prompt begins with BOS where the file does not say.
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
    "default": WordRules(_gpt2),  # files from before the name was recorded
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
