"""llama.cpp's vocabulary files: a GGUF without tensors, with texts and their token ids beside it.

llama.cpp keeps them in `models/`: `ggml-vocab-NAME.gguf`, `.gguf.inp` and `.gguf.out`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ModelError
from appliance.tokenizer import Tokenizer

_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one file's ids compare with the published ones.

    Attributes:
        refusal: why we cannot serve the file; empty if we can.
        wrong: texts that we encode to other ids.
    """

    name: str
    texts: int
    wrong: tuple[str, ...]
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.name}: refused, {self.refusal}"
        if not self.texts:
            return f"{self.name}: opens; no texts are published"
        right = self.texts - len(self.wrong)
        return f"{self.name}: {right} of {self.texts} texts" + "".join(
            f"\n    other ids for {text!r}" for text in self.wrong
        )


def compare_folder(folder: Path) -> list[Comparison]:
    """Compare a folder's files; skip empty ones."""
    files = sorted(folder.glob("ggml-vocab-*.gguf"))
    return [compare_file(file) for file in files if file.stat().st_size]


def compare_file(file: Path) -> Comparison:
    name = file.stem.removeprefix("ggml-vocab-")
    texts_file, ids_file = file.with_suffix(".gguf.inp"), file.with_suffix(".gguf.out")
    texts, ids = [], []
    if texts_file.is_file() and ids_file.is_file():
        texts = texts_file.read_bytes().decode().split(_BETWEEN_TEXTS)
        lines = ids_file.read_text().split("\n")
        ids = [[int(token_id) for token_id in line.split()] for line in lines[: len(texts)]]
    try:
        tokenizer = Tokenizer.from_path(file)
    except ModelError as error:
        return Comparison(name, len(texts), (), str(error))
    wrong = [
        text
        for text, wanted in zip(texts, ids, strict=True)
        if tokenizer.encode(text, add_special_tokens=False) != wanted
    ]
    return Comparison(name, len(texts), tuple(wrong))


if __name__ == "__main__":
    found = compare_folder(Path(sys.argv[1]).absolute())
    print(*found, sep="\n")  # noqa: T201
    sys.exit(not found or any(comparison.wrong for comparison in found))
