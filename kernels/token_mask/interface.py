"""The interface of banning tokens, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class MaskTokens(Protocol):
    """Applies masks without waiting, in Triton or on the CPU."""

    def __call__(self, logits: Tensor, rows: Tensor, words: Tensor) -> None: ...
