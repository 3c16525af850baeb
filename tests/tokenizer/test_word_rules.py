"""Word rules against llama.cpp's own splitter (recorded by record_splits.py) and the makers'."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from appliance.tokenizer import from_gguf
from appliance.tokenizer.pre_tokenizers import KNOWN_PATTERNS
from appliance.tokenizer.word_rules import WORD_RULES, recovered_name

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_splits.json").read_text())
TEXTS: list[str] = RECORDED["texts"]

ALPHABET = bytes_to_unicode()
IN_BYTES = "IN_BYTES"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED.replace("END", _SUFFIX).replace("DIGITS", r"\p{N}{1,3}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"
_CHINESE = "[一-龥ࠀ-一가-\ud7ff]+"
# The model's own tokenizer.json, where llama.cpp splits differently: llama.cpp knows no case beyond
# ASCII, keeps digits together that no token combines, reads some classes in another engine, and
# joins the text before digits to them.
MAKERS: dict[str, list[str]] = {
    "tekken": [_CASED.replace("END", "").replace("DIGITS", r"\p{N}")],
    "gpt-4o": [_GPT4O],
    "tiny_aya": [_FROM_RIGHT, _GPT4O],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",  # noqa: RUF001
        _CASED.replace("END", _SUFFIX).replace("DIGITS", r"\p{N}"),
    ],
    "kimi-k2": [
        r"\p{Han}+|"
        + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
    ],
    "falcon": [r"[\p{P}$+<=>^`|~]+", _GPT2, IN_BYTES, r"\p{N}+", "[0-9][0-9][0-9]"],
    "deepseek-llm": [
        "[\r\n]",
        r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[\p{Latin}\p{Greek}\p{Cyrillic}]]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",  # noqa: RUF001
        r"\s+$",
        _CHINESE,
        r"\p{N}",
    ],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"],
    "afmoe": [
        _FROM_RIGHT,
        "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ\u30a0-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
        "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7af\u1100-\u11ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ],
}
SAME_AS = {
    "gpt-4o": ("kanana2", "llama4", "talkie", "minimax-m2"),
    "tiny_aya": ("cohere2moe",),
}
OF_MAKER = {alias: name for name in MAKERS for alias in (name, *SAME_AS.get(name, ()))}


def ours(name: str, text: str) -> str:
    split = WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text)
    return " ".join(word for word, _ in split)


def in_bytes(word: str) -> str:
    return "".join(ALPHABET[byte] for byte in word.encode())


def makers(steps: list[str], text: str) -> str:
    """Split by each expression in turn, in an engine other than the tokenizers library's."""
    words = [text]
    for step in steps:
        if step == IN_BYTES:
            words = [in_bytes(word) for word in words]
            continue
        pattern = regex.compile(step, regex.VERSION1)
        words = [part for word in words for part in isolated(pattern, word)]
    return " ".join(words if IN_BYTES in steps else map(in_bytes, words))


def isolated(pattern: Any, text: str) -> list[str]:
    edges = [0]
    for found in pattern.finditer(text):
        edges += found.span()
    edges.append(len(text))
    return [text[at:to] for at, to in pairwise(edges) if at < to]


def test_every_name_of_llama_cpp_is_known() -> None:
    names = {name for split in RECORDED["splits"] for name in split["names"]}
    assert len(names) > 85
    assert names - WORD_RULES.keys() == {*from_gguf.MARKED_SPACES, "whitespace"}


@pytest.mark.parametrize("split", RECORDED["splits"], ids=lambda split: str(split["names"][0]))
def test_words_are_llama_cpps_or_the_makers(split: dict[str, Any]) -> None:
    for name in split["names"]:
        if name not in WORD_RULES:
            continue
        found = [ours(name, text) for text in TEXTS]
        if name not in OF_MAKER:
            assert found == split["words"], name
            continue
        assert found == [makers(MAKERS[OF_MAKER[name]], text) for text in TEXTS], name
        assert found != split["words"], f"llama.cpp splits by {name} as its maker now"


@pytest.mark.parametrize("unit", ["a", "A", " ", "1", "中", "\u0301", "'", "a ", "\n ", "-", "Aa"])
def test_known_expressions_take_linear_time(unit: str) -> None:
    for pattern in KNOWN_PATTERNS:
        split = Split(Regex(pattern), behavior="isolated")
        for end in ("x", "1"):
            took: list[float] = []
            while not took or (min(took) >= 0.4 and len(took) < 3):  # a busy machine is slower
                started = time.process_time()
                split.pre_tokenize_str(unit * 10_000 + end)
                took.append(time.process_time() - started)
            # An expression of quadratic time takes longer, as r"\s+$" would.
            assert min(took) < 0.4, pattern


def test_expressions_of_classes_of_transformers_are_known() -> None:
    expressions = {tokenization_qwen2.PRETOKENIZE_REGEX, tokenization_qwen3_5.PRETOKENIZE_REGEX}
    assert len(expressions) == 2
    assert expressions <= KNOWN_PATTERNS


def with_tokens(size: int, marks: dict[int, str]) -> list[str]:
    return [marks.get(index, f"t{index}") for index in range(size)]


@pytest.mark.parametrize(
    ("size", "marks", "name"),
    [
        (128256, {128000: "<|begin_of_text|>", 128009: "<|eot_id|>"}, "llama-bpe"),
        (151936, {151643: "<|endoftext|>", 151644: "<|im_start|>"}, "qwen2"),
        (50257, {50256: "<|endoftext|>"}, "gpt-2"),
        (128256, {128000: "<|begin_of_text|>"}, None),
        (151936, {151643: "<|endoftext|>"}, None),
        (50256, {}, None),
    ],
)
def test_rules_are_recovered_only_from_vocabularies_that_tell(
    size: int, marks: dict[int, str], name: str | None
) -> None:
    assert recovered_name(with_tokens(size, marks)) == name
