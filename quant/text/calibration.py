"""Cuts calibration text into equal rows of tokens, in an order that a seed decides."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from appliance.errors import QuantizeError
from appliance.files import replace_atomically
from appliance.quant.text.documents import (
    DATASET_PREFIX,
    documents_at,
    documents_of_dataset,
    sample,
)
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from appliance.quant.text.documents import Document, Message

MOST_DOCUMENTS = 2048  # documents to read, unless more rows are needed
USUAL_TOKENS = 24576  # docs/quantize.md says what more gains
ROWS_NAME = "rows.safetensors"


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A request for calibration text.

    Attributes:
        path: a text file or folder; None takes `default_rows.default_rows`.
        seed: decides the rows and their order.
        dataset: of a hub, in place of a path: org/name[:split[:column]].
    """

    path: Path | None = None
    num_tokens: int = USUAL_TOKENS
    row_tokens: int = 512
    seed: int = 0
    dataset: str | None = None

    @classmethod
    def parse(cls, text: str | None, num_tokens: int | None, *, seed: int) -> CalibrationText:
        """Parse --calibration: a path, hf:org/name[:split[:column]], or None."""
        num_tokens = USUAL_TOKENS if num_tokens is None else num_tokens
        if text is None:
            return cls(num_tokens=num_tokens, seed=seed)
        if text.startswith(DATASET_PREFIX):
            name = text.removeprefix(DATASET_PREFIX)
            return cls(num_tokens=num_tokens, seed=seed, dataset=name)
        return cls(Path(text).expanduser(), num_tokens, seed=seed)

    @property
    def is_at_hand(self) -> bool:
        """True if the text is a readable file, which may have changed."""
        return self.path is not None and self.path.exists()

    def rows_of(
        self, model_path: Path, *, device: str = "cpu", max_ram: int | None = None
    ) -> Calibration:
        """Tokenize the text for a model and cut it into rows.

        Args:
            device: to run the model on, if it writes its text.
            max_ram: limit in bytes for that; None takes what is free.

        Raises:
            QuantizeError: the text cannot be read, or is too short.
            ModelError: the model has no tokenizer.
        """
        tokenizer = Tokenizer.from_path(model_path)
        documents: Iterable[Document]
        if self.dataset is not None:
            documents, source = documents_of_dataset(self.dataset), self.dataset
        elif self.path is not None:
            documents, source = documents_at(self.path), self.path.name
        else:
            from appliance.quant.text.default_rows import default_rows

            return default_rows(model_path, tokenizer, self, device=device, max_ram=max_ram)
        return make_calibration(
            documents,
            tokenizer,
            source=source,
            num_tokens=self.num_tokens,
            row_tokens=self.row_tokens,
            seed=self.seed,
        )


def make_calibration(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    source: str,
    num_tokens: int,
    row_tokens: int,
    seed: int,
) -> Calibration:
    """Cut documents into rows; each row lies in one document.

    Args:
        documents: title and text of each. A model with a chat template sees each as an answer to a
            question about its title, as in its training data. Of very many, a sample is taken.
        num_tokens: of all rows, rounded up to whole rows.
        seed: decides the rows and their order.

    Raises:
        QuantizeError: the text is too short for that many tokens.
    """
    rows: list[list[int]] = []
    dropped = 0
    wanted = -(-num_tokens // row_tokens)
    for title, content in sample(documents, max(MOST_DOCUMENTS, 8 * wanted), seed):
        token_ids = _encode(tokenizer, title, content)
        count = len(token_ids) // row_tokens
        dropped += count == 0
        rows += [token_ids[i * row_tokens : (i + 1) * row_tokens] for i in range(count)]
    if len(rows) < wanted:
        raise QuantizeError(
            f"{source} makes {len(rows):,} rows of {row_tokens} tokens, but {wanted:,} are needed;"
            " give more text, shorter rows or fewer tokens"
        )
    random.Random(seed).shuffle(rows)
    chosen = torch.tensor(rows[:wanted])
    return Calibration(chosen, source, fingerprint(chosen), dropped)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rows that calibrate a model.

    Attributes:
        rows: (num_rows, row_tokens) int64.
        fingerprint: changes with every token.
        dropped: number of documents that were too short.
        peak_ram: peak bytes of memory while a model wrote rows; 0 if none did.
    """

    rows: Tensor
    source: str
    fingerprint: str
    dropped: int
    peak_ram: int = 0

    def __str__(self) -> str:
        count, length = self.rows.shape
        short = f", {self.dropped} documents too short" if self.dropped else ""
        return f"calibrated with {count} rows of {length} tokens of {self.source}{short}"


def fingerprint(rows: Tensor) -> str:
    """Hash the tokens of (num_rows, row_tokens)."""
    return hashlib.blake2b(rows.numpy().tobytes(), digest_size=8).hexdigest()


def save_rows(calibration: Calibration, folder: Path) -> None:
    """Keep rows for a later run without their text; raise OSError if the disk is full."""
    facts = {
        "source": calibration.source,
        "fingerprint": calibration.fingerprint,
        "dropped": str(calibration.dropped),
        "peak_ram": str(calibration.peak_ram),
    }
    with replace_atomically(folder / ROWS_NAME) as temporary:
        temporary.write_bytes(save({"rows": calibration.rows}, facts))


def load_rows(folder: Path) -> Calibration:
    """Load the rows of `save_rows`; raise QuantizeError if they are missing or damaged."""
    path = folder / ROWS_NAME
    try:
        with safe_open(path, "pt") as file:
            facts, rows = file.metadata(), file.get_tensor("rows")
            return Calibration(
                rows,
                facts["source"],
                facts["fingerprint"],
                int(facts["dropped"]),
                int(facts["peak_ram"]),
            )
    except (OSError, SafetensorError, KeyError) as error:
        raise QuantizeError(
            f"{path}, the calibration rows of an unfinished run, cannot be read: {error};"
            " add --restart to begin anew"
        ) from error


def _encode(tokenizer: Tokenizer, title: str, content: str | list[Message]) -> list[int]:
    if isinstance(content, str):
        if tokenizer.chat_template is None:
            return tokenizer.encode(content, add_special_tokens=True, allow_special=False)
        content = [
            {"role": "user", "content": f"Tell me about: {title}"},
            {"role": "assistant", "content": content},
        ]
    elif tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in content)
        return tokenizer.encode(text, add_special_tokens=True, allow_special=False)
    tokenizer.isolate_template()
    return tokenizer.encode_chat(content, add_generation_prompt=False)
