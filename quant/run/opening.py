"""Opens a run: its model, its plan and the text to calibrate with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.model.source import open_model
from appliance.progress.quantize_events import StepStarted
from appliance.quant.gguf.plan import plan_file
from appliance.quant.methods.mixed import PROBE_ROWS, PROBE_TOKENS
from appliance.quant.run.choices import choose_open
from appliance.quant.run.journal import Journal
from appliance.quant.run.memory import MemoryUse, return_large_blocks
from appliance.quant.run.memory_plan import check_mixed
from appliance.quant.run.options import Method, WeightFormat
from appliance.quant.run.plan import make_plan, stored_dtype
from appliance.quant.run.refusals import refuse_quantized, refuse_uncalibrated, refuse_unsaid
from appliance.quant.run.run import QuantizeRun
from appliance.quant.run.staging import StagingFolders, check_destination
from appliance.quant.text.calibration import Calibration, CalibrationText, load_rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from appliance.progress.quantize_events import OnEvent
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.options import QuantizeOptions


def open_run(
    model_path: Path, staging: StagingFolders, options: QuantizeOptions, started: float
) -> QuantizeRun:
    if options.max_ram is not None:
        return_large_blocks()
    # A run killed after renaming its result only has its staging folder to remove.
    journal = Journal(staging.state)
    is_published = journal.is_complete and not staging.result.exists()
    if options.restart or not is_published:
        check_destination(staging.out, model_path.resolve(), overwrite=options.overwrite)
    refuse_quantized(model_path)
    source = open_model(model_path)
    begun = journal.fingerprint.get("method") if journal.records and not options.restart else None
    options, chosen = choose_open(source, options, None if begun is None else Method.parse(begun))
    refuse_uncalibrated(source, options)
    plan = make_plan(source, options, stored_dtype(source, options.format))
    is_file = options.format is WeightFormat.GGUF
    if not is_file:
        refuse_unsaid(source)
    file = plan_file(source, plan, options.method) if is_file else None
    device = torch.device(options.device)
    return QuantizeRun(model_path, options, source, plan, device, started, file, chosen=chosen)


def with_precisions(run: QuantizeRun, chosen: Mapping[str, LinearScheme | None]) -> QuantizeRun:
    return replace(run, plan=make_plan(run.source, run.options, run.plan.dtype, chosen))


def check_mixed_memory(run: QuantizeRun) -> None:
    use = MemoryUse.now(torch.device("cpu"))  # where sensitivity is measured
    check_mixed(run.source, run.options, PROBE_ROWS * PROBE_TOKENS, use)


def calibration_of(
    run: QuantizeRun, state: Path, on_event: OnEvent, *, resumes: bool
) -> Calibration | None:
    """Return the calibration rows: from the text if it is available, else from an earlier run."""
    if not run.options.needs_text:
        return None
    text = run.options.text or CalibrationText()
    if resumes and not text.is_at_hand:
        return load_rows(state)
    if text.path is None and text.dataset is None:
        on_event(StepStarted(what="letting the model write text to calibrate with"))
    # A model that writes text takes the whole GPU: with a ceiling there it runs on the CPU.
    device = run.options.device if run.options.max_vram is None else "cpu"
    return text.rows_of(run.model_path, device=device, max_ram=run.options.max_ram)
