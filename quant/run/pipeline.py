"""Quantizes a model into a folder, with one tensor or one layer in memory at a time.

source -> plan -> for each unit: read, quantize, write, record -> rename. The result gets its name
once it is complete; recorded units are not repeated.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.checkpoint import CONFIG_NAME
from appliance.errors import ApplianceError, QuantizeError
from appliance.files import flush, read_json
from appliance.model.source import open_model
from appliance.quant.engines import quantize_by_engine
from appliance.quant.kv.even_keys import with_even_keys
from appliance.quant.kv.files import (
    kept_kv_plan,
    kv_scale_layouts,
    with_kv_scheme,
    write_kv_plan,
    write_kv_scales,
)
from appliance.quant.methods.mixed import PROBE_ROWS, PROBE_TOKENS
from appliance.quant.methods.precisions import kept_schemes, mixed_schemes
from appliance.quant.run.adapter_factors import write_adapter_factors
from appliance.quant.run.dry_run import out_of_memory_is_one_line, plan_run
from appliance.quant.run.fingerprint import fingerprint_of
from appliance.quant.run.journal import Journal
from appliance.quant.run.memory import MemoryUse, return_large_blocks
from appliance.quant.run.memory_plan import check_mixed
from appliance.quant.run.options import QuantizeLibrary, QuantizeOptions
from appliance.quant.run.plan import make_plan, stored_dtype
from appliance.quant.run.progress import LAYER, EventLog, UnitLog
from appliance.quant.run.run import QuantizeRun, report_of
from appliance.quant.run.shard_writer import ShardWriter
from appliance.quant.run.staging import StagingFolders, check_destination, locked
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.quant.run.writing import UnitWriter, units_of
from appliance.quant.text.calibration import Calibration, CalibrationText, load_rows, save_rows
from appliance.quant.walk.places import check_walked, is_plain
from appliance.quant.walk.stream import stream_bytes
from appliance.quantize_events import Done, RunFailed, Start, StepStarted, Written, ignore_event

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.report import QuantizeReport
    from appliance.quant.run.writing import WorkUnit
    from appliance.quantize_events import OnEvent, RunPlanned

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
            run = _open(model_path, staging, options, started)
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
    run = _open(model_path, staging, options, time.monotonic())
    calibration = _calibration(run, staging.state, ignore_event, resumes=False)
    if options.mixed is not None and calibration is not None:
        _check_mixed(run)
        run = _with_precisions(run, mixed_schemes(run.source, options, calibration, run.plan.dtype))
    return plan_run(run.source, run.plan, options, calibration, is_tried=True)[1]


def _open(
    model_path: Path, staging: StagingFolders, options: QuantizeOptions, started: float
) -> QuantizeRun:
    if options.max_ram is not None:
        return_large_blocks()
    # A run killed after renaming its result only has its staging folder to remove.
    is_published = Journal(staging.state).is_complete and not staging.result.exists()
    if options.restart or not is_published:
        check_destination(staging.out, model_path.resolve(), overwrite=options.overwrite)
    _refuse_quantized(model_path)
    source = open_model(model_path)
    _refuse_uncalibrated(source, options)
    plan = make_plan(source, options, stored_dtype(source))
    return QuantizeRun(model_path, options, source, plan, torch.device(options.device), started)


def _refuse_uncalibrated(source: ModelSource, options: QuantizeOptions) -> None:
    """Refuse options that read text but do not support a kind of layer of the model."""
    asked = {
        f"--method {options.method.value}": options.method.needs_text,
        "--mixed": options.mixed is not None,
        "--kv-bits": options.kv_bits is not None,
    }
    spec, attention = source.spec, source.spec.attention_layers.values()
    kinds = {
        "embeddings of each layer or of positions, or layers that share keys": (
            not spec.goes_layer_by_layer
        ),
    }
    of_heads = {
        "recurrent layers": spec.state_bytes > 0,
        "latent attention": bool(spec.latent_layers),
        "norms of values": any(a.value_norm for a in attention),
    }
    of_linears = {
        "experts": spec.has_experts,
        "layers that are not attention and an MLP with gates": not all(map(is_plain, spec.layers)),
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        check_walked(source, f"no {what} of it: use --method rtn, int8 or fp8, with --no-card")
    if options.card_tokens:
        check_walked(source, "no quality card of it: add --no-card")
    lacks = {"--mixed": kinds | of_heads | of_linears, "--kv-bits": kinds | of_heads}
    for what, is_asked in asked.items():
        found = [kind for kind, is_there in lacks.get(what, kinds).items() if is_there]
        if is_asked and found:
            raise QuantizeError(
                f"{source.path.name} has {found[0]}, which {what} does not calibrate; use --method "
                "rtn, int8 or fp8 without it, which need no text"
            )


def _with_precisions(run: QuantizeRun, chosen: Mapping[str, LinearScheme | None]) -> QuantizeRun:
    return replace(run, plan=make_plan(run.source, run.options, run.plan.dtype, chosen))


def _check_mixed(run: QuantizeRun) -> None:
    use = MemoryUse.now(torch.device("cpu"))  # where sensitivity is measured
    check_mixed(run.source, run.options, PROBE_ROWS * PROBE_TOKENS, use)


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
    calibration = _calibration(run, staging.state, events, resumes=resumes)
    fingerprint = fingerprint_of(run.model_path, run.options, calibration, run.device)
    if resumes:
        journal.check(fingerprint, staging.folder)
    if run.options.mixed is not None and calibration is not None:
        events(StepStarted(what="finding where bits matter most"))
        _check_mixed(run)
        chosen = kept_schemes(run.source, run.options, calibration, run.plan.dtype, staging.state)
        run = _with_precisions(run, chosen)
    if run.options.kv_bits is not None and calibration is not None:
        events(StepStarted(what="choosing the precision of the KV cache"))
        kv = kept_kv_plan(run.source, calibration, staging.state, run.device, run.options.kv_bits)
        run = replace(run, kv=kv, source=with_even_keys(run.source, kv.layers))
    if not journal.is_complete:
        units = units_of(run.plan)
        events(_start(run, staging.out, units, journal))
        _check_space(run, staging, calibration)
        if not resumes:  # first: the memory plan counts its memory, and a bad text fails early
            write_tokenizer_files(run.model_path, staging.result)
        # Finished layers show that the others fit; only a first run tries one.
        tried = False if resumes else None
        memory, planned = plan_run(run.source, run.plan, run.options, calibration, is_tried=tried)
        events(planned)
        if not resumes:
            if calibration is not None:
                save_rows(calibration, staging.state)
            journal.start(fingerprint)
        _fill(run, staging, journal, units, calibration, events, memory.workers)
        _finish(run, staging.result, journal)
        journal.complete()
    report = report_of(run, staging.out, journal, calibration)
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
    layouts = [*plan.layouts(), *kv_scale_layouts(run.source, run.kv)]
    with ShardWriter(staging.result, layouts, options.max_shard_bytes, written) as shards:
        writer = UnitWriter(run.source, plan, shards, log, run.device, workers)
        try:
            if calibration is None or not options.method.needs_text:
                writer.round(left, options.method)
            else:
                writer.calibrate(left, options.method, calibration, staging.state / STREAM)
        except QuantizeError:
            journal.start({})  # the same number would come up again
            raise
        write_kv_scales(run.source, run.kv, shards)
        shards.flush()
    events(Written(weight_bytes=weight_bytes))


def _finish(run: QuantizeRun, result: Path, journal: Journal) -> None:
    model_config = with_kv_scheme(run.plan.model_config(run.source.config), run.kv)
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
    for path in result.iterdir():
        flush(path)
    flush(result)


def _calibration(
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


def _refuse_quantized(model_path: Path) -> None:
    if not model_path.is_dir():
        return
    config = read_json(model_path / CONFIG_NAME).get("quantization_config")
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise QuantizeError(
            f"{model_path} is quantized already, with {method!r}; quantize the 16-bit model that"
            " it was made from"
        )


def _check_space(
    run: QuantizeRun, staging: StagingFolders, calibration: Calibration | None
) -> None:
    result = sum(tensor.nbytes for tensor in run.plan.tensors)
    work = 0
    if calibration is not None:
        work = 2 * stream_bytes(calibration.rows, run.source.spec.hidden_size)
    there = sum(path.stat().st_blocks * 512 for path in staging.folder.rglob("*"))
    free = shutil.disk_usage(staging.out.parent).free
    if result + work > there + free:
        raise QuantizeError(
            f"the result needs {result / 2**20:,.0f} MiB"
            + (f" and the work on it {work / 2**20:,.0f} MiB" * bool(work))
            + f", but {staging.out.parent} has {(there + free) / 2**20:,.0f} MiB free; make room or"
            " choose another --out"
        )
