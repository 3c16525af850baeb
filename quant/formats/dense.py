"""Reads unquantized weights, and what is unquantized among others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model_files.checkpoint import SafetensorsFolder


class DenseWeights:
    """Reads a folder of unquantized safetensors, one tensor at a time.

    Readers of quantized weights extend it: every folder has tensors that are stored as they are.
    """

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder

    def tensor_names(self) -> list[str]:
        return list(self._folder.tensor_names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(name)

    def packed_bits(self, name: str) -> int | None:
        return None

    def group_size(self, name: str) -> int | None:
        return None

    def float_bits(self, name: str) -> int | None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def load(self, name: str) -> Weight:
        return self._folder.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._folder.load_rows(name, start, stop)

    def load_part(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of the matrix at `index` of a stack."""
        return self._folder.load_part(name, index, start, stop)

    def load_matrix(self, name: str, index: int, *, transposed: bool) -> Weight | None:
        """Load the quantized matrix at `index` of a stack; None: the stack is not quantized.

        Args:
            transposed: it is stored as (in_features, out_features).
        """
        return None
