"""Cuts calibration text into equal rows of tokens, in an order that a seed decides.

By default the model writes most of the text; the rest is Python's help topics, prose and code of
free licence in every installation. Every second topic is reserved for evaluation.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from appliance.errors import QuantizeError
from appliance.files import replace_atomically
from appliance.quant.text.documents import (
    DATASET_PREFIX,
    default_documents,
    documents_at,
    documents_of_dataset,
    sample,
)
from appliance.runtime import child_environment
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from appliance.quant.text.documents import Document, Message

PROGRAM = "appliance.quant.text.row_writer"
MOST_DOCUMENTS = 2048  # documents to read, unless more rows are needed
ROWS_NAME = "rows.safetensors"
DEFAULT_TEXT = "Python's help topics"
# Share of the default rows that the model writes. With half, benchmark quantize on prose finds KL
# divergences of 0.155 by AWQ and 0.143 by GPTQ at 4 bits, asymmetric; with this share, 0.157 and
# 0.140.
OWN_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A request for calibration text.

    Attributes:
        path: a text file or folder; None takes `default_rows`.
        seed: decides the rows and their order.
        dataset: of a hub, in place of a path: org/name[:split[:column]].
    """

    path: Path | None = None
    num_tokens: int = 8192
    row_tokens: int = 512
    seed: int = 0
    dataset: str | None = None

    @classmethod
    def parse(cls, text: str | None, num_tokens: int, *, seed: int) -> CalibrationText:
        """Parse --text: a path, hf:org/name[:split[:column]], or None."""
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
class WrittenRows:
    """Rows that a model wrote.

    Attributes:
        peak_ram: peak bytes of both processes together.
    """

    rows: list[list[int]]
    peak_ram: int


def sample_rows(
    model_path: Path,
    count: int,
    row_tokens: int,
    seed: int,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> WrittenRows:
    """Let a model write rows of tokens, each from a random first word.

    The same seed gives the same rows on one machine.

    Args:
        model_path: a .gguf file or a model folder; the whole model must fit into memory.
        seed: of first words and sampling.
        max_ram: limit in bytes for both processes; None takes what is free.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    own = psutil.Process().memory_info().rss
    left = 0 if max_ram is None else max(1, max_ram - own)
    numbers = [str(number) for number in (count, row_tokens, seed, left)]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(model_path.resolve()), device, *numbers],
        stdin=subprocess.PIPE,  # closes when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            output, errors = child.stdout.read(), child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        reason = (errors.strip().splitlines() or ["it was killed"])[-1]
        raise QuantizeError(
            f"the model cannot write its own calibration text: {reason}; give a text with"
            " --calibration"
        )
    written = json.loads(output.splitlines()[-1])
    return WrittenRows(written["rows"], own + written["peak_ram"])


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


def default_rows(
    model_path: Path,
    tokenizer: Tokenizer,
    text: CalibrationText,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> Calibration:
    """Make rows of text that the model writes, and of help topics.

    If the model cannot run here, all rows are help topics, and the result's source says why.

    Args:
        text: gives number and length of rows, and the seed.
        max_ram: limit in bytes; None takes what is free.

    Raises:
        QuantizeError: the topics are too short for so many tokens.
    """
    row_tokens, seed = text.row_tokens, text.seed
    wanted = -(-text.num_tokens // row_tokens)
    own = round(OWN_SHARE * wanted)
    source, written = DEFAULT_TEXT, WrittenRows([], 0)
    try:
        written = sample_rows(model_path, own, row_tokens, seed, device=device, max_ram=max_ram)
        source = f"the model's own making ({own} rows)"
        if own < wanted:
            source += f" and {DEFAULT_TEXT}"
    except QuantizeError as error:
        source = f"{DEFAULT_TEXT} ({error})"
    topics_rows = make_calibration(
        default_documents(held_out=False),
        tokenizer,
        source=DEFAULT_TEXT,
        num_tokens=(wanted - len(written.rows)) * row_tokens,
        row_tokens=row_tokens,
        seed=seed,
    )
    rows = torch.tensor(written.rows, dtype=torch.int64).view(-1, row_tokens)
    rows = torch.cat((topics_rows.rows.view(-1, row_tokens).long(), rows))  # if empty: float
    return Calibration(rows, source, fingerprint(rows), topics_rows.dropped, written.peak_ram)


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
