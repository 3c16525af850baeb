"""Weights as they were trained: each tensor is read as it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.checkpoint import SafetensorsFolder


class DenseWeights:
    """Reads a folder of unquantized safetensors, tensor by tensor."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder

    def tensor_names(self) -> list[str]:
        """Every tensor of the folder."""
        return list(self._folder.tensor_names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._folder.shape(name)

    def packed_bits(self, name: str) -> int | None:
        """None: nothing here is packed."""
        return None

    def is_fp8(self, name: str) -> bool:
        """False: no scales belong to what is here."""
        return False

    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def load(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._folder.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read part of a tensor along its first dimension."""
        return self._folder.load_rows(name, start, stop)
