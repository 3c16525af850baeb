"""One run of `appliance quantize`: its opened and planned model, and its report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.gguf import GGUFFile
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.plan import growth_note
from appliance.quant.run.report import QuantizeReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import torch

    from appliance.model.source import ModelSource
    from appliance.quant.gguf.file_writer import PlannedFile
    from appliance.quant.kv.calibrate import KVPlan
    from appliance.quant.run.journal import Journal
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.run.plan import QuantizePlan
    from appliance.quant.text.calibration import Calibration

SHOWN_NOTES = 3


@dataclass(frozen=True, slots=True)
class QuantizeRun:
    model_path: Path
    options: QuantizeOptions
    source: ModelSource
    plan: QuantizePlan
    device: torch.device
    started: float  # by time.monotonic
    file: PlannedFile | None = None  # of a run that writes GGUF
    kv: KVPlan | None = None  # plan of the KV cache, once chosen
    chosen: tuple[str, ...] = ()  # notes on what was chosen for the user


def report_of(
    run: QuantizeRun, out: Path, journal: Journal, calibration: Calibration | None
) -> QuantizeReport:
    """Report a finished run; `out` is the model, a folder or a file."""
    plan, options = run.plan, run.options
    quantized = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    use = MemoryUse.now(run.device)
    peak_ram, peak_vram = journal.peaks
    return QuantizeReport(
        out=out,
        architecture=run.source.spec.architecture,
        method=options.method.value,
        scheme=options.form,
        num_quantized=len(quantized),
        quantized_parameters=sum(math.prod(tensor.shape) for tensor in quantized),
        quantized_bytes=sum(tensor.nbytes for tensor in quantized),
        parameters=sum(math.prod(tensor.shape) for tensor in plan.tensors),
        weight_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=max(
            time.monotonic() - run.started, sum(record.seconds for record in journal.records)
        ),
        losses={name: loss for record in journal.records for name, loss in record.losses.items()},
        peak_ram=max(use.peak_ram, peak_ram, 0 if calibration is None else calibration.peak_ram),
        peak_vram=max(use.peak_vram, peak_vram),
        notes=(
            *([] if run.kv is None else [str(run.kv)]),
            *_notes(run, calibration),
            *_first_of(note for record in journal.records for note in record.notes),
            *plan.notes,
        ),
        calibration="" if calibration is None else str(calibration),
        calibration_fingerprint="" if calibration is None else calibration.fingerprint,
        card_tokens=options.card_tokens,
    )


def _first_of(notes: Iterable[str]) -> Iterator[str]:
    """Yield the first notes of layers and the number of the others, which only events have."""
    every = list(notes)
    yield from every[:SHOWN_NOTES]
    if len(every) > SHOWN_NOTES:
        yield f"{len(every) - SHOWN_NOTES} more weights are like these"


def _notes(run: QuantizeRun, calibration: Calibration | None) -> Iterator[str]:
    yield from run.chosen
    yield from run.source.notes
    if calibration is not None:
        yield str(calibration)
    if run.model_path.is_file():
        file = GGUFFile(run.model_path)
        types = {file.type_name(n) for n in file.tensor_names() if len(file.shape(n)) == 2}
        lossy = sorted(types - {"F32", "F16", "BF16"})
        if lossy:
            yield (
                f"re-quantized from {', '.join(lossy)}, so the losses of both add up;"
                " the 16-bit model it was made from gives a better result"
            )
    growth = growth_note(run.source, run.plan)
    if growth is not None:
        yield growth
    if run.file is not None and run.options.method.scales_inputs:
        yield "inputs are scaled, so adapters that were made for the model itself do not fit"
