"""Opens a safetensors folder in any known weight format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from appliance.errors import UnsupportedModelError
from appliance.quant.formats import awq, compressed_tensors_config, fp4, fp8, gptq
from appliance.quant.formats.compressed_tensors import CompressedTensorsWeights
from appliance.quant.formats.dense import DenseWeights
from appliance.quant.formats.fp4 import Fp4Weights
from appliance.quant.formats.fp8 import Fp8Weights
from appliance.quant.formats.word_packed import WordPackedWeights

if TYPE_CHECKING:
    from appliance.checkpoint import SafetensorsFolder
    from appliance.kernels.weight import Weight


METHODS = (
    compressed_tensors_config.METHOD,
    awq.METHOD,
    gptq.METHOD,
    fp8.METHOD,
    fp8.MODELOPT,
    fp4.MXFP4,
)


class WeightReader(Protocol):
    """Reads a model's tensors on demand, by their unquantized names."""

    def tensor_names(self) -> list[str]:
        """List all tensors, such as model.layers.0.self_attn.q_proj.weight."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's unpacked shape without reading it."""
        ...

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a weight's integer codes once loaded; None if it has none."""
        ...

    def float_bits(self, name: str) -> int | None:
        """Return the bits of a weight's floating-point codes, 8 or 4; None if it has none."""
        ...

    def load(self, name: str) -> Weight:
        """Read one tensor; raise CheckpointError if parts are missing or damaged."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the tensors loaded so far, one line each."""
        ...


def is_read(config: object) -> bool:
    """Return True if a `quantization_config` names a known method."""
    return isinstance(config, dict) and config.get("quant_method") in METHODS


def open_weights(folder: SafetensorsFolder) -> WeightReader:
    """Choose the reader by `quantization_config`, or raise UnsupportedModelError."""
    config = folder.config.get("quantization_config")
    if config is None:
        return DenseWeights(folder)
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method in (fp4.MXFP4, fp8.MODELOPT, compressed_tensors_config.METHOD):
        form = fp4.declared_form(config)
        if form is not None:
            return Fp4Weights(folder, form)
    if method == compressed_tensors_config.METHOD:
        return CompressedTensorsWeights(folder)
    if method == awq.METHOD:
        return WordPackedWeights(folder, awq.declared_layout(config))
    if method == gptq.METHOD:
        return WordPackedWeights(folder, gptq.declared_layout(config))
    if method in (fp8.METHOD, fp8.MODELOPT):
        return Fp8Weights(folder)
    raise UnsupportedModelError(
        f"weights quantized by {method or config!r} cannot be read; supported are unquantized"
        " weights, compressed-tensors, AWQ, GPTQ, MXFP4, NVFP4, and FP8 of DeepSeek's or ModelOpt's"
        " form"
    )
