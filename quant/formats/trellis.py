"""Weights of the trellis format: reads a folder's tensors; see docs/trellis.md.

A weight M.weight (out_features, in_features) is stored as M.trellis (blocks, in_features, 8 * bits)
uint8, whose third size tells the bits, and M.trellis_scale (out_features,).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.weights.trellis import BITS, BLOCK, TrellisWeight
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model_files.checkpoint import SafetensorsFolder

METHOD = "trellis"  # quant_method in config.json
VERSION = 1
SYMBOLS, SCALE, _WEIGHT = ".trellis", ".trellis_scale", ".weight"


class TrellisWeights(DenseWeights):
    """Reads trellis weights, one tensor at a time, and those beside them that are not quantized.

    Raises:
        UnsupportedModelError: the folder is of another version.
    """

    def __init__(self, folder: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        super().__init__(folder)
        if (version := config.get("version")) != VERSION:
            raise UnsupportedModelError(
                f"weights of the trellis format are of version {version!r}; this appliance reads"
                f" version {VERSION}: update it, or quantize the model again"
            )
        stored = folder.tensor_names()
        modules = {name.removesuffix(SYMBOLS) for name in stored if name.endswith(SYMBOLS)}
        self._modules = {module + _WEIGHT: module for module in modules}
        parts = {module + part for module in modules for part in (SYMBOLS, SCALE)}
        self._names = sorted(self._modules.keys() | (set(stored) - parts))

    def tensor_names(self) -> list[str]:
        """List every tensor; a quantized weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        if (module := self._modules.get(name)) is None:
            return super().shape(name)
        return self._folder.shape(module + SCALE)[0], self._folder.shape(module + SYMBOLS)[1]

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a weight's symbols; None for other tensors."""
        if (module := self._modules.get(name)) is None:
            return super().packed_bits(name)
        return self._folder.shape(module + SYMBOLS)[2] // 8

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale: all, as an output has one."""
        return self.shape(name)[1] if name in self._modules else super().group_size(name)

    def load(self, name: str) -> Weight:
        if (module := self._modules.get(name)) is None:
            return super().load(name)
        symbols, scale = self._folder.load(module + SYMBOLS), self._folder.load(module + SCALE)
        return decode(name, symbols, scale)


def decode(name: str, symbols: Tensor, scale: Tensor) -> TrellisWeight:
    """Build a weight from its stored parts; see `TrellisWeight`.

    Raises:
        CheckpointError: types or shapes do not match, or a scale is not finite.
    """
    shape = tuple(symbols.shape)
    fits = (
        len(shape) == 3
        and shape[2] % 8 == 0
        and shape[2] // 8 in BITS
        and shape[1] % BLOCK == 0
        and scale.dim() == 1
        and shape[0] == -(-scale.shape[0] // BLOCK)
    )
    if not fits or str(symbols.dtype).removeprefix("torch.") != "uint8":
        raise CheckpointError(
            f"{name} has symbols of {shape} and scales of {tuple(scale.shape)}, which is no weight"
            " of the trellis format; download or quantize the model again"
        )
    weight = TrellisWeight(symbols.contiguous(), scale.contiguous())
    if not weight.is_finite():
        raise CheckpointError(
            f"{name} has a scale that is not finite; download or quantize the model again"
        )
    return weight
