"""Applies factors folded into a quantized model to adapters trained on the original.

A quantized linear computes W' = diag(1 / outputs) W diag(inputs), since its inputs come divided and
its outputs must be divided. Its adapter needs A' = A diag(inputs) and B' = diag(1 / outputs) B.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load

from appliance.errors import CheckpointError
from appliance.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.model.adapters.adapter import Adapter, LowRank
    from appliance.model.source import ModelSource

FACTORS_NAME = "adapter_factors.safetensors"  # in the model's folder
INPUTS, OUTPUTS = ".inputs", ".outputs"  # suffixes of a linear's name

FOREIGN_AWQ = (
    "the model is quantized with AWQ by another program, which may have folded scales into it that"
    " an adapter of the original lacks; compare its answers with those on the original"
)


def on_base(adapter: Adapter, source: ModelSource) -> Adapter:
    """Convert an original's adapter for its quantized model; CheckpointError for bad factors."""
    path = source.path / FACTORS_NAME
    if source.path.is_dir() and path.is_file():
        factors = _read(path)
        parts = {name: _changed(name, part, factors) for name, part in adapter.parts.items()}
        return replace(adapter, parts=parts)
    quantization = source.config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "awq":
        return replace(adapter, notes=(*adapter.notes, FOREIGN_AWQ))
    return adapter


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load(read_bytes(path))
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; quantize the model again") from None


def _changed(name: str, part: LowRank, factors: Mapping[str, Tensor]) -> LowRank:
    a, b = part.a, part.b
    if (inputs := factors.get(name + INPUTS)) is not None:
        a = a.float() * inputs
    if (outputs := factors.get(name + OUTPUTS)) is not None:
        b = b.float() / outputs[:, None]
    return replace(part, a=a, b=b)
