"""Collects facts for a card: of a checkpoint and its size, of its run, and of memory."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from appliance.errors import CheckpointError
from appliance.files import write_json
from appliance.gguf.header import read_header
from appliance.kernels.arrays import numpy_dtype
from appliance.model.reader import ModelReader
from appliance.model.text_part import TextPart
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.quality.card import (
    ModelFacts,
    QuantizeFacts,
    beside,
    card_of,
    weights_fingerprint,
)
from appliance.quant.quality.readers import readers_of
from appliance.quant.run.memory import peak_ram
from appliance.quant.run.plan import stored_dtype

if TYPE_CHECKING:
    from appliance.model.source import ModelSource
    from appliance.quant.run.run import QuantizeReport

NAME = "quantize.json"
GGUF_LAYERS = "blk."  # prefix of the names of a layer's tensors
_CLEAR = Path("/proc/self/clear_refs")


def facts_of(source: ModelSource) -> ModelFacts:
    """Collect a checkpoint's facts that need no computation."""
    size = stored_size(source)
    return ModelFacts(
        name=source.path.name,
        architecture=source.spec.architecture,
        weights=_weights_in_words(source),
        parameters=size.parameters,
        stored_bytes=size.stored_bytes,
        linear_parameters=size.linear_parameters,
        linear_bytes=size.linear_bytes,
        fingerprint=weights_fingerprint(source.path),
        readers=readers_of(source),
    )


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Content of the file.

    Attributes:
        weights: fingerprint of the run's weight files.
    """

    weights: str
    facts: QuantizeFacts


def keep_facts(report: QuantizeReport) -> QuantizeFacts:
    """Write a finished run's facts beside its weights, or raise CheckpointError; return them."""
    facts = QuantizeFacts(
        method=report.method,
        scheme=report.scheme,
        calibration=report.calibration,
        calibration_fingerprint=report.calibration_fingerprint,
        seconds=report.seconds,
        losses=report.losses,
        peak_ram_bytes=report.peak_ram,
        peak_vram_bytes=report.peak_vram,
        notes=report.notes,
    )
    write_facts(facts, report.out)
    return facts


def write_facts(facts: QuantizeFacts, model: Path) -> None:
    """Write a run's facts beside its weights, or raise CheckpointError."""
    content = RunFacts(weights_fingerprint(model), facts)
    write_json(beside(model, NAME), msgspec.to_builtins(content))


def facts_of_run(model: Path) -> QuantizeFacts | None:
    """Read the facts of the run that made these weights; None if it was not ours."""
    try:
        run = msgspec.json.decode(beside(model, NAME).read_bytes(), type=RunFacts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        run = None
    if run is not None and run.weights == weights_fingerprint(model):
        return run.facts
    try:
        card = card_of(model)
    except CheckpointError:
        return None  # the card is damaged or describes other weights
    return None if card is None else card.quantize


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Parameters and bytes of a checkpoint.

    Attributes:
        linear_bytes: of these, scales and zero points included.
    """

    parameters: int
    stored_bytes: int
    linear_parameters: int
    linear_bytes: int


def stored_size(source: ModelSource) -> StoredSize:
    """Measure an opened model by its headers."""
    slots = source.slots()
    linears = [slot for slot in slots if slot.is_linear]
    if source.path.is_file():
        tensors = read_header(source.path).tensors.values()
        stored_bytes = sum(tensor.nbytes for tensor in tensors)
        linear_bytes = sum(
            tensor.nbytes
            for tensor in tensors
            if tensor.name.startswith(GGUF_LAYERS) and len(tensor.shape) == 2
        )
    else:
        folder = SafetensorsFolder(source.path)
        others = set(source.weights.left) if isinstance(source.weights, TextPart) else set()
        sizes = {
            name: math.prod(folder.shape(name)) * numpy_dtype(folder.dtype(name)).itemsize
            for name in folder.tensor_names()
            if name not in others
        }
        stored_bytes = sum(sizes.values())
        # All tensors with a linear's module name belong to its weight, except the bias.
        modules = {slot.name.removesuffix(".weight") for slot in linears}
        linear_bytes = sum(
            size
            for name, size in sizes.items()
            if name.rpartition(".")[0] in modules and not name.endswith(".bias")
        )
    return StoredSize(
        parameters=sum(math.prod(slot.shape) for slot in slots),
        stored_bytes=stored_bytes,
        linear_parameters=sum(math.prod(slot.shape) for slot in linears),
        linear_bytes=linear_bytes,
    )


class PeakMemory:
    """Measures from its construction on.

    Linux can reset its high-water mark; if it cannot, the mark covers the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peaks(self) -> tuple[int, int]:
        """Return peak bytes of memory and of GPU memory."""
        vram = 0
        if self._device.type == "cuda":
            vram = torch.cuda.max_memory_allocated(self._device)
        return peak_ram(), vram


def quantizes_inputs(candidate: ModelSource) -> bool:
    config = candidate.config.get("quantization_config")
    if not isinstance(config, dict):
        return False
    groups = config.get("config_groups") or {}
    return config.get("activation_scheme") is not None or any(
        group.get("input_activations") is not None for group in groups.values()
    )


def _weights_in_words(source: ModelSource) -> str:
    # In the C library's types: GGUF's and FP4 stay as stored.
    reader = ModelReader(source, torch.device("cpu"), stored_dtype(source), native=True)
    is_packed = any(source.weights.packed_bits(slot.name) for slot in source.slots())
    for index in range(len(source.spec.layers) if is_packed else 1):  # packed layers may be mixed
        reader.layer(index)
    reader.embedding_and_head()
    return reader.weight_format()
