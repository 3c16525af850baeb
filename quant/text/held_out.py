"""Cuts evaluation windows from text that calibration never saw."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.errors import ConfigError, QuantizeError
from appliance.quant.text.documents import default_documents, documents_at

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.tokenizer import Tokenizer

DEFAULT_SOURCE = "Python's help topics, those that calibration leaves out"
SEPARATOR = "\n\n"  # between documents, as in WikiText


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A request for evaluation text.

    Attributes:
        path: a text file or folder; None takes the help topics that calibration leaves.
        num_tokens: most tokens of all windows together; None takes the whole text.
        stride: distance between windows, equal to the scored tokens of each; None is the window, so
            that windows do not overlap and begin without context.

    Raises:
        ConfigError: a number is out of range.
    """

    path: Path | None = None
    num_tokens: int | None = 4096
    window: int = 512
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.window < 16:
            raise ConfigError(f"a window of {self.window} tokens is too short; use 16 or more")
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise ConfigError(f"the stride must be between 1 and the window, {self.window} tokens")
        if self.num_tokens is not None and self.num_tokens < self.window:
            raise ConfigError(
                f"{self.num_tokens} tokens do not fill a window of {self.window}; read more,"
                " or in smaller windows"
            )

    def windows_of(self, tokenizer: Tokenizer) -> Windows:
        """Tokenize the text and cut it into windows.

        Documents are joined and cut regardless of their ends; each window begins with BOS if the
        model wants it. From a longer text, windows are taken at even distances.

        Raises:
            QuantizeError: the text cannot be read, or is too short for one window.
        """
        documents = default_documents(held_out=True) if self.path is None else read(self.path)
        text = SEPARATOR.join(text for _, text in documents)
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        prefix = tokenizer.encode("", add_special_tokens=True)
        body = self.window - len(prefix)
        stride = min(self.stride or body, body)
        starts = range(0, len(ids) - body + 1, stride)
        if not starts:
            raise QuantizeError(
                f"the text has {len(ids):,} tokens, which do not fill a window of {self.window};"
                " give more text or a shorter --window"
            )
        count = len(starts)
        if self.num_tokens is not None:
            count = min(count, max(1, self.num_tokens // (stride + len(prefix))))
        chosen = [starts[i * len(starts) // count] for i in range(count)]
        tokens = torch.tensor([prefix + ids[start : start + body] for start in chosen])
        source = DEFAULT_SOURCE if self.path is None else self.path.name
        return Windows(tokens, stride if stride < body else self.window, source)


@dataclass(frozen=True, slots=True)
class Windows:
    """Sequences of equal length.

    Attributes:
        tokens: (num_windows, window) int64.
        stride: number of a window's last tokens that are scored.
    """

    tokens: Tensor
    stride: int
    source: str

    @property
    def fingerprint(self) -> str:
        """Changes with every token, as `Calibration.fingerprint` does."""
        return hashlib.blake2b(self.tokens.numpy().tobytes(), digest_size=8).hexdigest()

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def scored(self, index: int) -> slice:
        """Return a window's positions whose next token is scored.

        With a stride, tokens that an earlier window scored are only context; the first window
        scores all.
        """
        first = 0 if index == 0 else self.length - self.stride - 1
        return slice(max(0, first), self.length - 1)


def read(path: Path) -> list[tuple[str, str]]:
    """Read the documents at a path; raise QuantizeError if there is nothing to read."""
    if not path.exists():
        raise QuantizeError(f"there is no text at {path}")
    return [
        (name, text if isinstance(text, str) else SEPARATOR.join(part["content"] for part in text))
        for name, text in documents_at(path)
    ]
