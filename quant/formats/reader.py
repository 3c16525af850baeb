"""Opens a folder of safetensors in whatever form its weights are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from appliance.errors import UnsupportedModelError
from appliance.quant.formats.compressed_tensors import CompressedTensorsWeights
from appliance.quant.formats.compressed_tensors_config import FORMAT, FP8_FORMAT, METHOD
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.checkpoint import SafetensorsFolder
    from appliance.kernels.fp8 import Fp8Weight
    from appliance.kernels.packed import PackedWeight


class WeightReader(Protocol):
    """Tensors of a model by the names they have unquantized, each read when it is asked for."""

    def tensor_names(self) -> list[str]:
        """Such as model.layers.0.self_attn.q_proj.weight."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, of a packed weight the unpacked one; reads no weights."""
        ...

    def packed_bits(self, name: str) -> int | None:
        """Bits of a quantized weight's codes as they load, None: dense; reads no weights."""
        ...

    def load(self, name: str) -> Tensor | PackedWeight | Fp8Weight:
        """Read one tensor."""
        ...


def open_weights(folder: SafetensorsFolder) -> WeightReader:
    """Choose the reader that `quantization_config` in config.json asks for.

    Raises:
        UnsupportedModelError: a quantization method or layout that is not read here.
    """
    config = folder.config.get("quantization_config")
    if config is None:
        return DenseWeights(folder)
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method == METHOD:
        return CompressedTensorsWeights(folder)
    raise UnsupportedModelError(
        f"weights quantized by {method!r} cannot be read; supported are unquantized weights and"
        f" {METHOD} in {FORMAT} or {FP8_FORMAT} form"
    )
