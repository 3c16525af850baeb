"""Record how llama.cpp splits texts into words, by the name that a GGUF file gives.

    python tests/tokenizer/record_splits.py LLAMA_CPP   # a checkout; takes a C++ compiler

Compiles its splitter alone, so the words are its own, not those of its expressions in another
engine. Writes recorded_splits.json beside this, which test_word_rules.py reads.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TEXTS = [
    "We'LL say it's DON'T, I'd've",
    "In 1995 it cost 1234567 or 12.5% (34)",
    "a  b   c \t d\n\n e\r\n  f \n",
    "camelCase HTTPServer x_y Zulu's fOO",
    "price: $5, 3/4 ... <|end|> [INST] !?\n/path//x",
    "Größe, cafe\u0301 naïve Ελλάδα Привет",
    "中文和日本語のテスト 한국어 คำไทย हिन्दी",
    "🙂 👍🏽 ½ Ⅻ ² ९९ \u3000x\u00a0y",
    "def f(x):\n    return x**2  # 100000\n",
    "   12 345 6789",
]

_MAIN = r"""
#include "unicode.h"
#include <cstdio>
#include <iostream>
static uint32_t number() { uint32_t v; if (fread(&v, 4, 1, stdin) != 1) exit(0); return v; }
static std::string text() {
    std::string s(number(), 0);
    fread(&s[0], 1, s.size(), stdin);
    return s;
}
int main() {
    std::vector<std::string> expressions(number()), texts(number());
    for (auto & e : expressions) e = text();
    for (auto & t : texts) t = text();
    for (auto & t : texts) {
        for (auto & word : unicode_regex_split(t, expressions, true)) std::cout << word << ' ';
        std::cout << '\n';
    }
}
"""
_ESCAPES = {"r": "\r", "n": "\n", "t": "\t"}


def expressions_by_type(source: str) -> dict[str, list[str]]:
    """The expressions in the switch of `llm_tokenizer_bpe`, by type."""
    start = source.index("switch (vocab.get_pre_type())")
    found: dict[str, list[str]] = {}
    types: list[str] = []
    open_case = False
    for line in source[start : source.index("bool byte_encode")].splitlines():
        case = re.match(r"\s*(?:case LLAMA_VOCAB_PRE_TYPE_(\w+)|default):", line)
        if case:
            types = [*(types if open_case else []), case[1] or "DEFAULT"]
            open_case = True
        elif literal := re.match(r'\s*"((?:[^"\\]|\\.)*)"', line):
            open_case = False
            text = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), literal[1])
            for kind in types:
                found.setdefault(kind, []).append(text)
    return found


def types_by_name(source: str) -> dict[str, str]:
    start, end = source.index("tokenizer_pre.empty()"), source.index("unknown pre-tokenizer type")
    found = {}
    for branch in source[start:end].split("else if"):
        kind = re.search(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+)", branch)
        for name in re.findall(r'tokenizer_pre == "([^"]+)"', branch):
            assert kind is not None, branch
            found[name] = kind[1]
    return found


def compiled_splitter(source: Path, folder: Path) -> Path:
    (folder / "main.cpp").write_text(_MAIN)
    files = [folder / "main.cpp", source / "unicode.cpp", source / "unicode-data.cpp"]
    out = folder / "splitter"
    subprocess.run(["g++", "-O1", "-std=c++17", f"-I{source}", *files, "-o", out], check=True)
    return out


def words_of(splitter: Path, expressions: list[str]) -> list[str]:
    """The words of each text in the alphabet of byte-level vocabularies, separated by spaces."""
    parts = [text.encode() for text in (*expressions, *TEXTS)]
    message = struct.pack("<II", len(expressions), len(TEXTS)) + b"".join(
        struct.pack("<I", len(part)) + part for part in parts
    )
    output = subprocess.run([splitter], input=message, capture_output=True, check=True).stdout
    return [" ".join(line.split()) for line in output.decode().split("\n")[:-1]]


def record(checkout: Path) -> dict[str, object]:
    source = checkout / "src"
    vocabulary = (source / "llama-vocab.cpp").read_text()
    expressions = expressions_by_type(vocabulary)
    names: dict[str, list[str]] = {}
    for name, kind in types_by_name(vocabulary).items():
        names.setdefault(kind, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        splitter = compiled_splitter(source, Path(folder))
        splits = [
            {"names": sorted(of_kind), "words": words_of(splitter, expressions[kind])}
            for kind, of_kind in names.items()
        ]
    return {"texts": TEXTS, "splits": splits}


if __name__ == "__main__":
    recorded = record(Path(sys.argv[1]))
    target = Path(__file__).parent / "recorded_splits.json"
    target.write_text(json.dumps(recorded, ensure_ascii=False, indent=1) + "\n")
