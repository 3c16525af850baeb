"""Writes a model folder's tensors unit by unit: layers, and tensors outside the layers.

A unit is done when its tensors are on disk and the journal records it. Units are rounded one by
one, or calibrated layer by layer.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.quant.methods import data_free
from appliance.quant.methods.calibrated import quantize_layers
from appliance.quant.run.adapter_factors import scales_as_facts
from appliance.quant.run.progress import LAYER
from appliance.quant.walk.pieces import WeightPieces, row_ranges
from appliance.quant.walk.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.quant.formats import WeightReader
    from appliance.quant.methods.calibrated import QuantizedLayer
    from appliance.quant.run.options import Method, QuantizedWeight
    from appliance.quant.run.plan import PlannedTensor, QuantizePlan
    from appliance.quant.run.progress import UnitLog
    from appliance.quant.run.shard_writer import PlacedTensors
    from appliance.quant.text.calibration import Calibration

PIECE_ELEMENTS = 1 << 18  # numbers of a weight processed at once: 1 MiB in float32
GPU_PIECE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """The smallest work that is finished, or repeated on resuming, as a whole.

    Attributes:
        name: "layer 3", the words for another part, or the tensor's name.
        layer: index; None for a tensor outside the layers.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]
    layer: int | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def units_of(plan: QuantizePlan) -> list[WorkUnit]:
    units: dict[str, tuple[int | None, list[PlannedTensor]]] = {}
    for tensor in plan.tensors:
        layer = tensor.slot.layer
        name = tensor.name if layer is None else f"{LAYER}{layer}"
        if tensor.part is not None:
            name = tensor.part.what
        units.setdefault(name, (layer, []))[1].append(tensor)
    return [WorkUnit(name, tuple(tensors), layer) for name, (layer, tensors) in units.items()]


@dataclass(frozen=True, slots=True)
class UnitWriter:
    source: ModelSource
    plan: QuantizePlan
    shards: PlacedTensors
    log: UnitLog
    device: torch.device
    workers: int

    def round(self, units: list[WorkUnit], method: Method) -> None:
        """Quantize every weight without text; see `data_free`."""
        weights = self.source.weights
        with Rounding(weights, self.plan, method, self.workers, self.device) as rounding:
            for unit in units:
                started = time.perf_counter()
                for tensor in unit.tensors:
                    self._round(rounding, tensor)
                self._finish(unit, started)

    def calibrate(
        self,
        units: list[WorkUnit],
        method: Method,
        calibration: Calibration,
        folder: Path,
        matters: Mapping[str, Tensor],
    ) -> None:
        """Quantize layer by layer with calibration rows; round the tensors outside the layers.

        Args:
            folder: for the residual stream; may hold that of an interrupted run.
            matters: of the outputs of weights by name, see `quantize_layers`.
        """
        layers = {unit.layer: unit for unit in units if unit.layer is not None}
        if layers:
            first = min(layers)
            planned = {tensor.name: tensor for tensor in self.plan.tensors}
            schemes = {name: tensor.scheme for name, tensor in planned.items()}

            def keep(name: str, value: Weight) -> None:
                self._write(planned[name], value)

            started = time.perf_counter()
            walk = Walk(self.source, calibration.rows, folder, self.device, first)
            for layer in quantize_layers(
                self.source,
                walk,
                method,
                schemes,
                self.plan.dtype,
                keep,
                first=first,
                matters=matters,
            ):
                self._finish(layers[layer.index], started, layer)
                started = time.perf_counter()
        self.round([unit for unit in units if unit.layer is None], method)

    def _finish(self, unit: WorkUnit, started: float, layer: QuantizedLayer | None = None) -> None:
        self.shards.flush()
        seconds = time.perf_counter() - started
        if layer is None:
            self.log.commit(unit.name, unit.nbytes, seconds)
        else:
            self.log.commit(
                unit.name,
                unit.nbytes,
                seconds,
                losses=layer.losses,
                notes=layer.notes,
                facts=scales_as_facts(layer.scales),
            )

    def _write(self, tensor: PlannedTensor, value: Weight) -> None:
        if isinstance(value, Tensor):
            assert tensor.scheme is None, tensor.name
            (layout,) = tensor.stored
            self.shards.write(tensor.name, [value.to(layout.dtype).cpu()])
        else:
            assert tensor.scheme is not None, tensor.name
            for name, stored in self.plan.store.encode(tensor.name, value, tensor.scheme).items():
                self.shards.write(name, [stored.cpu()])

    def _round(self, rounding: Rounding, tensor: PlannedTensor) -> None:
        if tensor.scheme is None:
            self.shards.write(tensor.name, rounding.plain(tensor))
        else:
            self._write(tensor, rounding.packed(tensor))


class Rounding:
    """Rounds pieces of a weight in parallel threads, each with torch on one core.

    Torch's own threads synchronize after each operation, which takes ten times as long as the work
    while another program uses the cores.
    """

    def __init__(
        self,
        weights: WeightReader,
        plan: QuantizePlan,
        method: Method,
        workers: int,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._plan = plan
        self._method = method
        self._device = device
        self._piece = GPU_PIECE_ELEMENTS if device.type == "cuda" else PIECE_ELEMENTS
        self._workers = ThreadPoolExecutor(workers)
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Rounding:
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def plain(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield an unquantized tensor in its planned type, some rows at a time."""
        (layout,) = tensor.stored
        if tensor.part is not None:
            yield from tensor.part.rows(tensor.slot, layout.dtype, self._piece)
            return
        pieces = WeightPieces(self._weights, tensor.name)
        for rows in row_ranges(tensor.shape, self._piece):
            yield pieces.rows(rows).to(layout.dtype)

    def packed(self, tensor: PlannedTensor) -> QuantizedWeight:
        """Quantize a weight by its planned scheme."""
        scheme = tensor.scheme
        assert scheme is not None, tensor.name
        part = tensor.part
        pieces = part.pieces(tensor.slot) if part else WeightPieces(self._weights, tensor.name)

        def quantize_rows(rows: slice) -> QuantizedWeight:
            piece = pieces.rows(rows).to(self._device)
            found = data_free.quantize(piece, scheme, self._method, self._plan.dtype)
            return found.to(torch.device("cpu"))

        ranges = row_ranges(tensor.shape, self._piece)
        return data_free.concatenate(list(self._workers.map(quantize_rows, ranges)))
