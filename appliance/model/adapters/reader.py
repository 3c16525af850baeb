"""Opens an adapter in any supported format and checks it against its model.

A quantized linear computes W' = diag(1 / outputs) W diag(inputs), since its inputs come divided and
its outputs must be divided. An original's adapter then needs A' = A diag(inputs) and
B' = diag(1 / outputs) B, whose factors lie beside the quantized model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load

from appliance.errors import AdapterError, CheckpointError
from appliance.files import read_bytes
from appliance.model.adapters.gguf_adapter import read_gguf
from appliance.model.adapters.peft_folder import read_folder
from appliance.model.adapters.peft_settings import CONFIG_NAME
from appliance.model.adapters.targets import adapter_targets
from appliance.model_files.gguf_names import is_gguf

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


def read_adapter(path: Path, base: ModelSource, most_ranks: int) -> Adapter:
    """Read a PEFT folder or a GGUF adapter of llama.cpp.

    Args:
        most_ranks: largest rank of a linear.

    Raises:
        AdapterError: the adapter is unusable; names the field or tensor, and the fix.
    """
    targets = adapter_targets(base.spec, base.family.names)
    if path.is_dir():
        adapter = read_folder(path, base, targets)
    elif path.is_file() and is_gguf(path):
        adapter = read_gguf(path, base, targets)
    else:
        raise AdapterError(
            f"{path} is no adapter: give a folder with {CONFIG_NAME} and safetensors, or a .gguf"
            " file"
        )
    for name, part in adapter.parts.items():
        if part.rank > most_ranks:
            raise AdapterError(
                f"{path}: {name} has rank {part.rank}, and at most {most_ranks} are allowed;"
                f" start with --max-lora-rank {adapter.rank}"
            )
    return on_base(adapter, base)


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
