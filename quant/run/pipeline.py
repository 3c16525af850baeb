"""Quantizes a model into a folder, with one tensor or one layer in memory at a time.

source -> plan -> for each unit: read, quantize, write, record -> rename. The result gets its name
once it is complete; recorded units are not repeated.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, QuantizeError
from appliance.files import flush
from appliance.model_files.checkpoint import CONFIG_NAME
from appliance.progress.quantize_events import (
    Done,
    RunFailed,
    Start,
    StepStarted,
    Written,
    ignore_event,
)
from appliance.quant.engines import quantize_by_engine
from appliance.quant.gguf.file_writer import GGUFFileWriter
from appliance.quant.kv.calibrate import (
    kept_kv_plan,
    kv_scale_layouts,
    with_kv_scheme,
    write_kv_plan,
    write_kv_scales,
)
from appliance.quant.kv.even_keys import with_even_keys
from appliance.quant.methods.mixed import kept_schemes, mixed_schemes
from appliance.quant.run.adapter_factors import write_adapter_factors
from appliance.quant.run.dry_run import out_of_memory_is_one_line, plan_run
from appliance.quant.run.fingerprint import fingerprint_of
from appliance.quant.run.opening import (
    calibration_of,
    check_mixed_memory,
    open_run,
    with_precisions,
)
from appliance.quant.run.options import QuantizeLibrary, QuantizeOptions, WeightFormat
from appliance.quant.run.progress import LAYER, EventLog, UnitLog
from appliance.quant.run.refusals import check_space
from appliance.quant.run.run import Journal, QuantizeRun, report_of
from appliance.quant.run.run_time import measured_rate, run_time
from appliance.quant.run.shard_writer import PlacedTensors, ShardWriter
from appliance.quant.run.staging import StagingFolders, locked, model_of
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.quant.run.writing import UnitWriter, units_of
from appliance.quant.text.calibration import Calibration, save_rows
from appliance.quant.walk.slopes import kept_mean_squares

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.progress.quantize_events import OnEvent, RunPlanned
    from appliance.quant.run.run import QuantizeReport
    from appliance.quant.run.writing import WorkUnit

STREAM = "stream"  # in the state folder


def quantize_model(
    model_path: Path,
    out: Path,
    options: QuantizeOptions | None = None,
    on_event: OnEvent = ignore_event,
) -> QuantizeReport:
    """Quantize the linear weights of a model's layers and write a model folder.

    An interrupted run keeps its finished layers in `.OUT.partial`; the same call continues from
    there and gives the same bytes. A weight or activation that is not finite discards them, since
    it would come up again.

    Args:
        model_path: a .gguf file, or a folder with config.json and safetensors.
        options: of the run; 4 bits by rounding by default.
        on_event: called with the run's progress.

    Raises:
        CheckpointError: the model is damaged or incomplete.
        UnsupportedModelError: the model is not supported.
        MemoryPlanError: the run exceeds the memory it may use.
        ChangedRunError: an unfinished run for `out` differs from this one.
        QuantizeError: the destination exists, the disk is full, a weight is not finite or the model
            is already quantized.
    """
    started = time.monotonic()
    options = options or QuantizeOptions()
    if options.engine is not QuantizeLibrary.APPLIANCE:
        return quantize_by_engine(model_path, out, options)
    staging = StagingFolders(out.resolve())
    try:
        with out_of_memory_is_one_line("this run"):
            run = open_run(model_path, staging, options, started)
            report = _quantize(run, staging, on_event)
    except OSError as error:
        message = f"cannot write {staging.out}: {error.strerror}; {what_is_kept(out)}"
        on_event(RunFailed(message=message, units_done=_units_done(staging)))
        raise QuantizeError(message) from error
    except (ApplianceError, KeyboardInterrupt) as error:
        message = str(error) or "interrupted"
        on_event(RunFailed(message=message, units_done=_units_done(staging)))
        raise
    on_event(
        Done(
            out=str(report.out),
            seconds=report.seconds,
            weight_bytes=report.weight_bytes,
            bits_per_weight=report.bits_per_weight,
            peak_ram=report.peak_ram,
            peak_vram=report.peak_vram,
            notes=report.notes,
        )
    )
    return report


def what_is_kept(out: Path) -> str:
    """Describe what an unfinished run left for a destination."""
    staging = StagingFolders(out.resolve())
    done = _units_done(staging)
    if not done:
        return "nothing was left there"
    return (
        f"{done} finished parts are kept in {staging.folder}, and the same command goes on from"
        " there"
    )


def _units_done(staging: StagingFolders) -> int:
    return len(Journal(staging.state).records)


def dry_run(model_path: Path, out: Path, options: QuantizeOptions) -> RunPlanned:
    """Make the checks of `quantize_model`, try the largest layer, and write nothing.

    Returns:
        The run's resources, and each tensor's planned form.
    """
    staging = StagingFolders(out.resolve())
    run = open_run(model_path, staging, options, time.monotonic())
    calibration = calibration_of(run, staging.state, ignore_event, resumes=False)
    options = run.options
    if options.mixed is not None and calibration is not None:
        check_mixed_memory(run)
        run = with_precisions(run, mixed_schemes(run.source, options, calibration, run.plan.dtype))
    return plan_run(run.source, run.plan, options, calibration, is_tried=True)[1]


def _quantize(run: QuantizeRun, staging: StagingFolders, on_event: OnEvent) -> QuantizeReport:
    with locked(staging):
        journal = Journal(staging.state)
        lost = journal.is_complete and not (staging.result.exists() or staging.out.exists())
        if run.options.restart or lost or not journal.records:
            staging.start_over()
            journal = Journal(staging.state)
        try:
            return _go_on(run, staging, journal, on_event)
        except BaseException as error:
            if not journal.records:
                staging.discard()
            else:
                failed = RunFailed(message=str(error), units_done=len(journal.records))
                with contextlib.suppress(OSError):
                    EventLog(staging.state).record(failed)
            raise


def _go_on(
    run: QuantizeRun, staging: StagingFolders, journal: Journal, on_event: OnEvent
) -> QuantizeReport:
    resumes = bool(journal.records)
    events = EventLog(staging.state, on_event)
    if not resumes:
        events(run_time(run.source, run.options, measured_rate(run.device)))
    calibration = calibration_of(run, staging.state, events, resumes=resumes)
    fingerprint = fingerprint_of(run.model_path, run.options, calibration, run.device)
    if resumes:
        journal.check(fingerprint, staging.folder)
    if run.options.mixed is not None and calibration is not None:
        events(StepStarted(what="finding where bits matter most"))
        check_mixed_memory(run)
        chosen = kept_schemes(run.source, run.options, calibration, run.plan.dtype, staging.state)
        run = with_precisions(run, chosen)
    if run.options.kv_bits is not None and calibration is not None:
        events(StepStarted(what="choosing the precision of the KV cache"))
        kv = kept_kv_plan(run.source, calibration, staging.state, run.device, run.options.kv_bits)
        run = replace(run, kv=kv, source=with_even_keys(run.source, kv.layers))
    if not journal.is_complete:
        units = units_of(run.plan)
        events(_start(run, staging.out, units, journal))
        check_space(run, staging, calibration)
        # First: the memory plan counts its memory, and a bad text fails early.
        if not resumes and run.file is None:
            write_tokenizer_files(run.model_path, staging.result)
        # Finished layers show that the others fit; only a first run tries one.
        tried = False if resumes else None
        memory, planned = plan_run(run.source, run.plan, run.options, calibration, is_tried=tried)
        events(planned)
        if not resumes:
            if calibration is not None:
                save_rows(calibration, staging.state)
            journal.start(fingerprint)
        matters = {}
        if run.options.method.weighs_outputs and calibration is not None:
            events(StepStarted(what="finding which outputs matter most"))
            matters = kept_mean_squares(run.source, calibration.rows, staging.state, run.device)
        _fill(run, staging, journal, units, calibration, events, memory.workers, matters)
        _finish(run, staging, journal)
        journal.complete()
    report = report_of(run, model_of(staging.out, run.options.format), journal, calibration)
    staging.publish()
    return report


def _start(run: QuantizeRun, out: Path, units: list[WorkUnit], journal: Journal) -> Start:
    return Start(
        model=str(run.model_path),
        out=str(out),
        architecture=run.source.spec.architecture,
        method=run.options.method.value,
        scheme=run.options.form,
        units=len(units),
        units_done=len(journal.records),
        weight_bytes=sum(unit.nbytes for unit in units),
        max_ram=run.options.max_ram,
        max_vram=run.options.max_vram,
    )


def _fill(
    run: QuantizeRun,
    staging: StagingFolders,
    journal: Journal,
    units: list[WorkUnit],
    calibration: Calibration | None,
    events: EventLog,
    workers: int,
    matters: Mapping[str, Tensor],
) -> None:
    options, plan = run.options, run.plan
    finished = {record.unit for record in journal.records}
    done = [unit for unit in units if unit.name in finished]
    left = [unit for unit in units if unit.name not in finished]
    weight_bytes = sum(unit.nbytes for unit in units)
    written = {layout.name for unit in done for t in unit.tensors for layout in t.stored}
    log = UnitLog(
        journal,
        events,
        total_units=len(units),
        total_layers=len(run.source.spec.layers),
        total_bytes=weight_bytes,
        bytes_done=sum(unit.nbytes for unit in done),
        device=run.device,
    )
    with _writer_of(run, staging, written) as shards:
        writer = UnitWriter(run.source, plan, shards, log, run.device, workers)
        try:
            if calibration is None or not options.method.needs_text:
                writer.round(left, options.method)
            else:
                writer.calibrate(left, options.method, calibration, staging.state / STREAM, matters)
        except QuantizeError:
            journal.start({})  # the same number would come up again
            raise
        write_kv_scales(run.source, run.kv, shards)
        shards.flush()
    events(Written(weight_bytes=weight_bytes))


def _writer_of(run: QuantizeRun, staging: StagingFolders, written: set[str]) -> PlacedTensors:
    if run.file is not None:
        path = staging.result / model_of(staging.out, WeightFormat.GGUF).name
        return GGUFFileWriter(path, run.file, written)
    layouts = [*run.plan.layouts(), *kv_scale_layouts(run.source, run.kv)]
    return ShardWriter(staging.result, layouts, run.options.max_shard_bytes, written)


def _finish(run: QuantizeRun, staging: StagingFolders, journal: Journal) -> None:
    result = staging.result
    if run.file is None:
        _describe(run, result, journal)
    if run.projector is not None:
        run.projector.write(result / model_of(staging.out, WeightFormat.GGUF).name)
    for path in result.iterdir():
        flush(path)
    flush(result)


def _describe(run: QuantizeRun, result: Path, journal: Journal) -> None:
    """Write the files beside the safetensors."""
    model_config = with_kv_scheme(run.plan.model_config(run.source), run.kv)
    config = json.dumps(model_config, indent=2, ensure_ascii=False)
    if run.kv is not None:
        write_kv_plan(run.kv, result)
    facts = [
        (int(record.unit.removeprefix(LAYER)), record.facts)
        for record in journal.records
        if record.unit.startswith(LAYER)
    ]
    write_adapter_factors(run.source, facts, () if run.kv is None else run.kv.layers, result)
    (result / CONFIG_NAME).write_text(config + "\n", encoding="utf-8")
