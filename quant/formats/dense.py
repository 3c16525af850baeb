"""Reads unquantized weights as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.checkpoint import SafetensorsFolder


class DenseWeights:
    """Reads a folder of unquantized safetensors, one tensor at a time."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder

    def tensor_names(self) -> list[str]:
        """List every tensor of the folder."""
        return list(self._folder.tensor_names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._folder.shape(name)

    def packed_bits(self, name: str) -> int | None:
        """Return None: no tensor is packed."""
        return None

    def is_fp8(self, name: str) -> bool:
        """Return False: no tensor has scales."""
        return False

    def notes(self) -> tuple[str, ...]:
        """Return nothing: nothing is lost."""
        return ()

    def load(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._folder.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of a tensor."""
        return self._folder.load_rows(name, start, stop)
