"""Windows of a text that calibration never saw, to measure with."""

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
SEPARATOR = "\n\n"  # between documents, as WikiText is joined


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """What to measure with.

    Attributes:
        path: a text file or a folder of them; None takes the help topics that calibration leaves.
        num_tokens: in all windows together, at most; None takes the whole text.
        window: tokens that are read in one piece.
        stride: from window to window, and so the tokens of each that are scored; None is the
            window, so that windows do not overlap and each begins without context.

    Raises:
        ConfigError: a number that makes no sense.
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
        """The text as a tokenizer cuts it.

        Documents are joined and cut without regard to where they end; each window begins with BOS
        if the model wants it. Of a text longer than asked for, windows are taken evenly spread.

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
        stride: how many of the last tokens of a window are scored.
        source: where the text came from, for people.
    """

    tokens: Tensor
    stride: int
    source: str

    @property
    def fingerprint(self) -> str:
        """Changes with every token, in the way of `Calibration.fingerprint`."""
        return hashlib.blake2b(self.tokens.numpy().tobytes(), digest_size=8).hexdigest()

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return self.tokens.shape[1]

    def scored(self, index: int) -> slice:
        """The places of a window whose next token is scored: all but the last, or fewer.

        With a stride, what an earlier window scored is context only; the first one scores all.
        """
        first = 0 if index == 0 else self.length - self.stride - 1
        return slice(max(0, first), self.length - 1)


def read(path: Path) -> list[tuple[str, str]]:
    """Documents at a path.

    Raises:
        QuantizeError: there is nothing to read.
    """
    if not path.exists():
        raise QuantizeError(f"there is no text at {path}")
    return [
        (name, text if isinstance(text, str) else SEPARATOR.join(part["content"] for part in text))
        for name, text in documents_at(path)
    ]
