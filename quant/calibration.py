"""Calibration rows: text as equal rows of tokens, in an order that a seed decides.

Without a text of one's own, Python's help topics serve: prose and code of free licence that every
installation has. Every second topic is left for evaluation, which must not see what was calibrated.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from appliance.errors import QuantizeError
from appliance.files import replace_atomically
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

SUFFIXES = (".txt", ".md", ".rst")
ROWS_NAME = "rows.safetensors"
DEFAULT_TEXT = "Python's help topics"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model is shown while it is quantized.

    Attributes:
        rows: (num_rows, row_tokens) int64.
        source: where the text came from, for people.
        fingerprint: changes with every token of it.
        dropped: documents too short to be of use.
    """

    rows: Tensor
    source: str
    fingerprint: str
    dropped: int

    def __str__(self) -> str:
        count, length = self.rows.shape
        short = f", {self.dropped} documents too short" if self.dropped else ""
        return f"calibrated with {count} rows of {length} tokens of {self.source}{short}"


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """What to calibrate with.

    Attributes:
        path: a text file, or a folder of them; None takes Python's help topics.
        num_tokens: in all rows together.
        row_tokens: in a row.
        seed: decides which rows are taken, and in which order.
    """

    path: Path | None = None
    num_tokens: int = 8192
    row_tokens: int = 512
    seed: int = 0

    @property
    def is_at_hand(self) -> bool:
        """Whether the text can be read now."""
        return self.path is None or self.path.exists()

    def rows_of(self, model_path: Path) -> Calibration:
        """The text as a model's tokenizer cuts it.

        Raises:
            QuantizeError: the text cannot be read, or is too short.
            ModelError: the model has no tokenizer.
        """
        if self.path is None:
            documents, source = default_documents(held_out=False), DEFAULT_TEXT
        else:
            documents, source = documents_at(self.path), self.path.name
        return make_calibration(
            documents,
            Tokenizer.from_path(model_path),
            source=source,
            num_tokens=self.num_tokens,
            row_tokens=self.row_tokens,
            seed=self.seed,
        )


def save_rows(calibration: Calibration, folder: Path) -> None:
    """Keep rows, so that a later run needs their text no more.

    Raises:
        OSError: they cannot be written.
    """
    facts = {
        "source": calibration.source,
        "fingerprint": calibration.fingerprint,
        "dropped": str(calibration.dropped),
    }
    with replace_atomically(folder / ROWS_NAME) as temporary:
        temporary.write_bytes(save({"rows": calibration.rows}, facts))


def load_rows(folder: Path) -> Calibration:
    """Rows that `save_rows` kept.

    Raises:
        QuantizeError: they are not there, or damaged.
    """
    path = folder / ROWS_NAME
    try:
        with safe_open(path, "pt") as file:
            facts, rows = file.metadata(), file.get_tensor("rows")
            return Calibration(rows, facts["source"], facts["fingerprint"], int(facts["dropped"]))
    except (OSError, SafetensorError) as error:
        raise QuantizeError(
            f"{path}, the calibration rows of an unfinished run, cannot be read: {error};"
            " add --restart to begin anew"
        ) from error


def default_documents(*, held_out: bool) -> list[tuple[str, str]]:
    """Title and text of help topics: those for calibration, or the others."""
    return [(name, topics[name]) for name in sorted(topics)[int(held_out) :: 2]]


def documents_at(path: Path) -> list[tuple[str, str]]:
    """Name and text of a file, or of all text files below a folder.

    Raises:
        QuantizeError: there is nothing to read, or it is no UTF-8.
    """
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise QuantizeError(f"{path} holds no {', '.join(SUFFIXES)} file to calibrate with")
    try:
        return [(file.stem, file.read_text(encoding="utf-8")) for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"cannot read calibration text {path}: {error}") from error


def make_calibration(
    documents: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    source: str,
    num_tokens: int,
    row_tokens: int,
    seed: int,
) -> Calibration:
    """Cut documents into rows: each begins where a document does, none spans two.

    Args:
        documents: title and text of each. A model with a chat template sees them as answers to a
            question about the title, as it saw its training data.
        tokenizer: of the model.
        source: for people.
        num_tokens: in all rows together, rounded up to whole rows.
        row_tokens: in a row.
        seed: decides which rows are taken, and in which order.

    Raises:
        QuantizeError: the text is too short for that many tokens.
    """
    rows: list[list[int]] = []
    dropped = 0
    for title, text in documents:
        token_ids = _encode(tokenizer, title, text)
        count = len(token_ids) // row_tokens
        dropped += count == 0
        rows += [token_ids[i * row_tokens : (i + 1) * row_tokens] for i in range(count)]
    wanted = -(-num_tokens // row_tokens)
    if len(rows) < wanted:
        raise QuantizeError(
            f"{source} makes {len(rows):,} rows of {row_tokens} tokens, but {wanted:,} are needed;"
            " give more text, shorter rows or fewer tokens"
        )
    random.Random(seed).shuffle(rows)
    chosen = torch.tensor(rows[:wanted])
    digest = hashlib.blake2b(chosen.numpy().tobytes(), digest_size=8).hexdigest()
    return Calibration(chosen, source, digest, dropped)


def _encode(tokenizer: Tokenizer, title: str, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(text, add_special_tokens=True, allow_special=False)
    messages = [
        {"role": "user", "content": f"Tell me about: {title}"},
        {"role": "assistant", "content": text},
    ]
    return tokenizer.encode_chat(messages, add_generation_prompt=False)
