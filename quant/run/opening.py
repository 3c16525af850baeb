"""Opens a run: its model, an open method's choice, its plan and the text to calibrate with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.errors import ApplianceError, MemoryPlanError, QuantizeError
from appliance.kernels.cpu.library import LibraryError, load_library
from appliance.kernels.weights.fp8 import BLOCK
from appliance.kernels.weights.trellis import BLOCK as TRELLIS_BLOCK
from appliance.model.source import open_model
from appliance.progress.quantize_events import StepStarted
from appliance.quant.formats.scheme import GROUP_SIZES, Fp8Scheme, WeightScheme
from appliance.quant.gguf.from_checkpoint import plan_file
from appliance.quant.gguf.projector import projector_of
from appliance.quant.methods.mixed import PROBE_ROWS, PROBE_TOKENS
from appliance.quant.run.memory import MemoryUse, return_large_blocks
from appliance.quant.run.memory_plan import check_mixed, plan_memory
from appliance.quant.run.options import Method, WeightFormat, read_asked
from appliance.quant.run.plan import make_plan, stored_dtype
from appliance.quant.run.refusals import (
    refuse_quantized,
    refuse_uncalibrated,
    refuse_unsaid,
    why_not_calibrated,
    why_not_measured,
)
from appliance.quant.run.run import Journal, QuantizeRun
from appliance.quant.run.staging import StagingFolders, check_destination
from appliance.quant.run.writing import PIECE_ELEMENTS
from appliance.quant.text.calibration import Calibration, CalibrationText, load_rows
from appliance.quant.walk.places import is_plain
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.progress.quantize_events import OnEvent
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.options import QuantizeOptions

USUAL_GROUP = 64
BY_LOSS = (Method.AWQ_GPTQ, Method.GPTQ, Method.AWQ)  # docs/quantize.md has the figures
# Types of GGUF files lost 7 % more with scaled inputs (SmolLM2-135M in IQ4_XS).
BY_LOSS_IN_FILES = (Method.GPTQ, Method.AWQ)


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
    file = plan_file(source, plan, options) if is_file else None
    projector = None
    if file is not None:
        projector, notes = projector_of(source, file, options.tower_bits)
        chosen += notes
    device = torch.device(options.device)
    return QuantizeRun(
        model_path, options, source, plan, device, started, file, projector, chosen=chosen
    )


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


def choose_open(
    source: ModelSource, options: QuantizeOptions, begun: Method | None = None
) -> tuple[QuantizeOptions, tuple[str, ...]]:
    """Return options that leave nothing open, and a note on each choice that is not the usual.

    Args:
        begun: method of an unfinished run, which goes on whatever memory is free now.
    """
    options, notes = _fitting_blocks(source, options)
    if options.method is not Method.OPEN:
        return options, notes
    if options.format is WeightFormat.TRELLIS:
        lacking = _why_no_trellis(source, options, begun)
        if not lacking:
            return replace(options, method=Method.TRELLIS, open=frozenset()), notes
        options = _without_trellis(options, lacking)
        notes += (f"--format compressed-tensors, because {lacking}",)
    scheme = options.scheme
    if isinstance(scheme, WeightScheme):
        scheme = _readable(source, options, scheme)
    reads_text = "text" not in options.open
    options, reason = replace(options, scheme=scheme, open=frozenset()), ""
    if not reads_text:
        options = replace(options, method=Method.RTN)
    elif begun is None:
        options, reason = _least_loss(source, options)
    else:
        options = replace(options, method=begun)
    if reason:
        notes += (f"--method {options.method.value}, because {reason}",)
    if options.card_tokens and (lacking := why_not_measured(source)):
        options = replace(options, card_tokens=0)
        notes += (f"no quality card: {lacking}",)
    return options, notes


def _why_no_trellis(source: ModelSource, options: QuantizeOptions, begun: Method | None) -> str:
    """Say why a model cannot have the trellis format; "" if it can."""
    if begun is not None:
        return "" if begun is Method.TRELLIS else f"the run was begun with --method {begun.value}"
    if reason := why_not_calibrated(source):
        return reason
    for slot in source.slots():
        if slot.is_linear and not slot.role.decides and slot.shape[1] % TRELLIS_BLOCK:
            return f"{slot.name} has {slot.shape[1]} inputs, which blocks of 64 do not divide"
    try:
        load_library()
        Tokenizer.from_path(source.path)
        _check_memory(source, replace(options, method=Method.TRELLIS))
    except (LibraryError, ApplianceError) as error:
        return str(error)
    return ""


def _without_trellis(options: QuantizeOptions, lacking: str) -> QuantizeOptions:
    """Return options of a folder that others read, or raise QuantizeError if none has its bits."""
    if "format" not in options.open or options.scheme.bits not in (3, 4):
        raise QuantizeError(f"the trellis format is not possible: {lacking}")
    asked = read_asked(None, options.scheme.bits, None, symmetric=None)
    return replace(
        options,
        scheme=asked.scheme,
        open=asked.open,
        format=WeightFormat.COMPRESSED_TENSORS,
    )


def _fitting_blocks(
    source: ModelSource, options: QuantizeOptions
) -> tuple[QuantizeOptions, tuple[str, ...]]:
    """Take FP8 by channel where blocks would be cut, which transformers and vLLM do not read."""
    scheme = options.scheme
    if not isinstance(scheme, Fp8Scheme) or not scheme.blockwise:
        return options, ()
    for slot in source.slots():
        if slot.is_linear and any(size % BLOCK for size in slot.shape):
            rows, columns = slot.shape
            return replace(options, scheme=replace(scheme, blockwise=False)), (
                f"FP8 by channel, not in blocks of {BLOCK}x{BLOCK}: they do not divide {slot.name}"
                f" of {rows}x{columns}, and other programs read whole blocks alone",
            )
    return options, ()


def _readable(source: ModelSource, options: QuantizeOptions, scheme: WeightScheme) -> WeightScheme:
    """Choose groups and zero points so that transformers and vLLM read the result."""
    widths = {slot.shape[1] for slot in source.slots() if slot.is_linear}
    grouped = [width for width in widths if width % GROUP_SIZES[-1] == 0]
    if "group_size" in options.open:
        sizes = (size for size in GROUP_SIZES if size <= USUAL_GROUP)
        dividing = [size for size in sizes if all(width % size == 0 for width in grouped)]
        scheme = replace(scheme, group_size=max(dividing))
    if "symmetric" not in options.open:
        return scheme
    fitted = {scheme.fit(width)[0] for width in grouped}
    has_own_head = options.head_bits != 16 and not source.spec.tied_head
    are_several = len(fitted) > 1 or options.mixed is not None or has_own_head
    symmetric = are_several or source.spec.has_experts or options.format is WeightFormat.GPTQ
    return replace(scheme, symmetric=symmetric)


def _least_loss(source: ModelSource, options: QuantizeOptions) -> tuple[QuantizeOptions, str]:
    """Return the options with the best method that works, and why it is not the best of all."""
    rounded = replace(options, method=Method.RTN)
    is_file = options.format is WeightFormat.GGUF
    reason = why_not_calibrated(source)
    if not reason and is_file and not all(map(is_plain, source.spec.layers)):
        reason = "some layers are not attention and an MLP with gates"
    if reason:
        return rounded, f"{reason}, which methods with text do not calibrate"
    try:
        Tokenizer.from_path(source.path)
    except ApplianceError as error:
        return rounded, f"text cannot be read for the model: {error}"
    first = None
    by_loss = BY_LOSS_IN_FILES if is_file else BY_LOSS
    for method in by_loss:
        tried = replace(options, method=method)
        try:
            _check_memory(source, tried)
        except MemoryPlanError as error:
            first = first or error
        else:
            return tried, "" if first is None else f"{by_loss[0].value} does not fit: {first}"
    return rounded, f"other methods do not fit: {first}"


def _check_memory(source: ModelSource, options: QuantizeOptions) -> None:
    text, device = options.text or CalibrationText(), torch.device(options.device)
    rows = -(-text.num_tokens // text.row_tokens), text.row_tokens
    plan = make_plan(source, options, stored_dtype(source, options.format))
    threads = torch.get_num_threads()
    plan_memory(source, plan, options, rows, MemoryUse.now(device), threads, PIECE_ELEMENTS)
