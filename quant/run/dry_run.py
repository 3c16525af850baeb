"""Tries the part of a run that needs most memory before the run starts."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from appliance.errors import MemoryPlanError, QuantizeError
from appliance.model.tensors import Role
from appliance.progress.quantize_events import RunPlanned, TensorClass
from appliance.quant.methods.calibrated import quantize_layers
from appliance.quant.run.evaluation_memory import EvaluationMemory
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.memory_plan import MIB, ceiling_for, plan_memory
from appliance.quant.run.plan import growth_note
from appliance.quant.run.writing import PIECE_ELEMENTS, Rounding, units_of
from appliance.quant.walk.walk import Walk, disk_bytes, tokens_at_once
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.quant.run.memory_plan import RunMemory
    from appliance.quant.run.options import Method, QuantizeOptions
    from appliance.quant.run.plan import PlannedTensor, QuantizePlan
    from appliance.quant.text.calibration import Calibration

ROOMY = 0.5  # share of the free memory; a run that takes less is not tried


def plan_run(
    source: ModelSource,
    plan: QuantizePlan,
    options: QuantizeOptions,
    calibration: Calibration | None,
    *,
    is_tried: bool | None = None,
) -> tuple[RunMemory, RunPlanned]:
    """Plan a run's memory and, if it may not fit, try its largest part.

    Args:
        is_tried: try the run; by default if there is a ceiling or the run takes half of the free
            memory.

    Raises:
        MemoryPlanError: the run exceeds the memory it may use.
        QuantizeError: activations of the first layer are not finite.
    """
    device = torch.device(options.device)
    num_rows, row_tokens = (0, 0) if calibration is None else calibration.rows.shape
    use = MemoryUse.now(device)
    card = EvaluationMemory.of_run(source, options)
    card_ram = 0 if card is None else card.peak(use.ram)
    memory = plan_memory(
        source,
        plan,
        options,
        (num_rows, row_tokens),
        use,
        torch.get_num_threads(),
        PIECE_ELEMENTS,
    )
    if is_tried is None:
        is_tried = (options.max_ram or options.max_vram) is not None or (
            memory.ram - use.ram > ROOMY * memory.free
        )
    seconds, ram, vram = 0.0, memory.ram, memory.vram
    if is_tried:
        with out_of_memory_is_one_line("trying the largest layer"):
            if calibration is None:
                seconds = _round_largest(source, plan, options.method, memory.workers, device)
            else:
                seconds = _calibrate_largest(source, plan, options, calibration, device)
        release_unused()
        tried = MemoryUse.now(device)
        ram, vram = tried.peak_ram, tried.peak_vram
        _check(ram, options.max_ram, "--max-ram")
        _check(vram, options.max_vram, "--max-vram")
    disk = 0
    if calibration is not None:
        ram = max(ram, calibration.peak_ram)
        disk = disk_bytes(source.spec, calibration.rows)
    growth = growth_note(source, plan)
    return memory, RunPlanned(
        peak_ram=max(ram, card_ram),
        peak_vram=vram,
        disk_bytes=disk,
        seconds=seconds,
        measured=is_tried,
        classes=tuple(_classes(plan)),
        notes=() if growth is None else (growth,),
    )


@contextmanager
def out_of_memory_is_one_line(what: str) -> Iterator[None]:
    """Turn every out-of-memory error into a MemoryPlanError of one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        short = "can't allocate memory" in str(error) or "out of memory" in str(error)
        if not (short or isinstance(error, MemoryError)):
            raise
        raise MemoryPlanError(
            f"the memory did not suffice for {what}; end other programs, or use --method rtn"
        ) from error


def _check(measured: int, ceiling: int | None, flag: str) -> None:
    if ceiling is not None and measured > ceiling:
        raise MemoryPlanError(
            f"the largest layer took {measured / MIB:,.0f} MiB where {ceiling / MIB:,.0f} MiB may"
            f" be used; {ceiling_for(flag, measured)}"
        )


def _round_largest(
    source: ModelSource,
    plan: QuantizePlan,
    method: Method,
    workers: int,
    device: torch.device,
) -> float:
    """Round the tensors written with the largest weight, in sequence as a run does.

    Returns:
        Estimated seconds for all weights.
    """

    def size(tensor: PlannedTensor) -> tuple[bool, int]:
        return tensor.scheme is not None, tensor.nbytes

    unit = max(units_of(plan), key=lambda unit: max(map(size, unit.tensors)))
    started = time.perf_counter()
    with Rounding(source.weights, plan, method, workers, device) as rounding:
        for tensor in unit.tensors:
            if tensor.scheme is not None:
                plan.store.encode(tensor.name, rounding.packed(tensor), tensor.scheme)
    seconds = time.perf_counter() - started
    return seconds * sum(tensor.nbytes for tensor in plan.tensors) / unit.nbytes


def _calibrate_largest(
    source: ModelSource,
    plan: QuantizePlan,
    options: QuantizeOptions,
    calibration: Calibration,
    device: torch.device,
) -> float:
    """Quantize the largest layer with as many rows as pass it together."""
    sizes: Counter[int] = Counter()
    for unit in units_of(plan):
        if unit.layer is not None:
            sizes[unit.layer] = sum(tensor.shape[0] * tensor.shape[-1] for tensor in unit.tensors)
    largest = max(sizes, key=lambda index: (sizes[index], -index))
    num_rows, row_tokens = calibration.rows.shape
    at_once = tokens_at_once(row_tokens) // row_tokens
    schemes = {tensor.name: tensor.scheme for tensor in plan.tensors}

    def keep(name: str, value: Weight) -> None:
        scheme = schemes[name]
        if scheme is not None:
            assert not isinstance(value, torch.Tensor), name
            plan.store.encode(name, value, scheme)

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        walk = Walk(source, calibration.rows[:at_once], Path(folder), device)
        layers = quantize_layers(
            source, walk, options.method, schemes, plan.dtype, keep, first=largest
        )
        try:
            next(layers)
        except QuantizeError:
            if largest == 0:  # only layer 0 gets the same inputs as in the run
                raise
    seconds = time.perf_counter() - started
    gc.collect()
    portions = -(-num_rows // at_once)
    return len(sizes) * (seconds + walk.seconds * (portions - 1))


def _classes(plan: QuantizePlan) -> Iterator[TensorClass]:
    words = {Role.EMBEDDING: "embedding", Role.HEAD: "head"}
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor in plan.tensors:
        usual = "layer weights" if tensor.slot.is_linear else "norms and biases"
        kind = words.get(tensor.role, usual) if tensor.part is None else tensor.part.what
        form = "16 bits" if tensor.scheme is None else str(tensor.scheme)
        counts[kind, form] += 1
        sizes[kind, form] += tensor.nbytes
    for (kind, form), count in counts.items():
        yield TensorClass(tensors=kind, count=count, form=form, nbytes=sizes[kind, form])
