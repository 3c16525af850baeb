"""`appliance quantize`: writes a model with fewer bits per weight, ready to serve."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from appliance.commands.model_argument import Model
from appliance.config import cache_dir, jobs_dir, parse_size
from appliance.errors import ApplianceError
from appliance.progress.quantize_events import (
    Measuring,
    QuantizeEvent,
    Start,
    StepStarted,
    UnitFinished,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from appliance.progress.jobs import JobFile
    from appliance.progress.quantize_events import OnEvent
    from appliance.quant.run.run import QuantizeReport

QUANTIZING = "quantizing"


def quantize(
    model: Model = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; must not exist.",
            show_default="MODEL's name and the bits, beside MODEL or, of a hub's, here",
        ),
    ] = None,
    reader: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Make what this program reads: appliance, with the least loss of all, llama.cpp,"
            " transformers or vllm.",
            show_default="a folder that appliance, transformers and vllm read",
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Round in seconds, without text and with more loss.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="awq+gptq, gptq or awq, which lose less; trellis, which loses least; nvfp4 or"
            " mxfp4, floats of 4 bits; or rtn, fp8, int8, which need no text.",
            show_default="the one of least loss that model and memory allow",
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="3, 4 or 8; of gguf also 2, 5 and 6, the usual type of as many; of trellis 2"
            " to 5.",
            show_default="4; 8 of fp8 and int8",
        ),
    ] = None,
    group_size: Annotated[
        str | None,
        typer.Option(
            help="Inputs that share a scale: 32, 64, 128 or channel; of fp8 also block, 128x128"
            " weights.",
            show_default="64 or 32; channel of fp8 and int8; gguf has its own",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--no-symmetric",
            help="No zero points: they lose less. A type of gguf says it.",
            show_default="symmetric with --method; else zero points where other programs read them",
        ),
    ] = None,
    mixed: Annotated[
        float | None,
        typer.Option(help="Bits per weight, scales included, to spend where they matter most."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="Bits of the head, 4, 8 or 16, and of gguf 2 to 6; of both ends if they are tied.",
            show_default="16; 6 of gguf, or 8 if the layers have 8",
        ),
    ] = None,
    embedding: Annotated[
        int | None,
        typer.Option(
            help="Bits of the embedding of a model with a head of its own.",
            show_default="16; of gguf as the layers",
        ),
    ] = None,
    tower: Annotated[
        int,
        typer.Option(help="Bits of the tower of a model that reads pictures, 16 or 8."),
    ] = 16,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text file, folder of them, or hf:DATASET, to which :SPLIT and :COLUMN may be"
            " added.",
            show_default="text that the model writes, and source code of Python's library",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens to calibrate with.", show_default="24576")
    ] = None,
    kv_bits: Annotated[
        float | None,
        typer.Option(help="Bits of a KV cache element, such as 8, 6 or 4.75: chosen by layer."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the rows of text.")] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="Of the files: compressed-tensors, awq, gptq, gguf or trellis.",
            show_default="compressed-tensors; gguf with --type; trellis with its method",
        ),
    ] = None,
    file_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Of a GGUF file, by llama.cpp's names, such as Q4_K_M, IQ4_XS or Q3_K_S.",
            show_default="Q4_K_M, or that of --bits",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Who quantizes: appliance, or autoawq or optimum if installed.")
    ] = "appliance",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard what an unfinished run for OUT left; begin anew."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where layers compute: auto, cpu or cuda.")] = "auto",
    max_ram: Annotated[
        str | None,
        typer.Option(help="Most memory of the process, such as 6GiB.", show_default="what is free"),
    ] = None,
    max_vram: Annotated[
        str | None, typer.Option(help="Most memory on the GPU.", show_default="what is free")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Try the largest layer, say what a run takes, write nothing."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Events as lines of JSON on standard output.")
    ] = False,
    card: Annotated[
        bool, typer.Option(help="Measure the result on held-out text, and write its quality card.")
    ] = True,
    card_tokens: Annotated[int, typer.Option(help="Tokens to measure on.")] = 4096,
    pictures: Annotated[
        Path | None,
        typer.Option(
            help="Folder of pictures for the card, as of evaluate.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Quantize a model's weights into a folder that can be served.

    A run that is cut short keeps the layers it has done; the same command goes on from there.
    """
    from appliance.runtime import limit_spinning

    limit_spinning()

    from appliance.commands.quantize_display import choose_display, describe_plan
    from appliance.hub import resolve_model
    from appliance.progress.jobs import JobFile
    from appliance.progress.progress import ProgressLine
    from appliance.progress.quantize_events import encode_event
    from appliance.quant.run import pipeline
    from appliance.quant.run.options import (
        Method,
        QuantizeLibrary,
        QuantizeOptions,
        ResultReader,
        WeightFormat,
        choose_device,
    )
    from appliance.quant.run.result_reader import Words, usual_out
    from appliance.quant.text.calibration import CalibrationText

    library = QuantizeLibrary.parse(engine)
    if method is None and library is not QuantizeLibrary.APPLIANCE:
        method = Method.RTN.value  # each has a method of its own
    given = {
        "--calibration": calibration,
        "--calibration-tokens": calibration_tokens,
        "--mixed": mixed,
        "--kv-bits": kv_bits,
    }
    reads = None if reader is None else ResultReader.parse(reader)
    words = Words(
        reader=reads,
        fast=fast,
        method=None if method is None else Method.parse(method),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        format=None if format is None else WeightFormat.parse(format),
        file_type=file_type,
        text=tuple(name for name, value in given.items() if value is not None),
    )
    asked, form = words.read()
    options = QuantizeOptions(
        scheme=asked.scheme,
        method=asked.method,
        open=asked.open,
        file_type=asked.file_type,
        reader=reads,
        head=head,
        mixed=mixed,
        embedding=embedding,
        tower_bits=tower,
        text=CalibrationText.parse(calibration, calibration_tokens, seed=seed),
        format=form,
        engine=library,
        overwrite=overwrite,
        restart=restart,
        device=choose_device(device),
        max_ram=None if max_ram is None else parse_size(max_ram),
        max_vram=None if max_vram is None else parse_size(max_vram),
        kv_bits=kv_bits,
        card_tokens=card_tokens if card else 0,
    )
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
    if out is None:
        is_here = Path(model).expanduser().exists() and bool(model)
        out = usual_out(resolved.name, resolved.path.parent if is_here else Path(), options)
        typer.echo(f"the result will be {out}; --out names another folder", err=True)
    if dry_run:
        plan = pipeline.dry_run(resolved.path, out, options)
        typer.echo(encode_event(plan).decode() if as_json else "\n".join(describe_plan(plan)))
        return
    display = choose_display(as_json=as_json)
    with JobFile(jobs_dir(), f"quantize {resolved.path.name}") as job:

        def tell(event: QuantizeEvent) -> None:
            display(event)
            tell_job(job, event)

        with _interruptible(lambda: pipeline.what_is_kept(out)), display:
            report = pipeline.quantize_model(resolved.path, out, options, tell)
        typer.echo(report.summary(), err=True)
        later = f"make it with: appliance evaluate {report.out} --against {resolved.path}"
        with _interruptible(lambda: f"the weights are done, their quality card is not; {later}"):
            make_card_of_run(
                report, resolved.path, report.card_tokens, options.max_ram, tell, pictures
            )
    typer.echo(f"serve it with: appliance serve {report.out}", err=True)


class _TerminatedError(KeyboardInterrupt): ...


@contextmanager
def _interruptible(what_is_kept: Callable[[], str]) -> Iterator[None]:
    """Exit on Ctrl-C and SIGTERM with one line about the kept work.

    Raises:
        typer.Exit: with 130 or 143.
    """

    def terminate(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted; {what_is_kept()}", err=True)
        code = 143 if isinstance(error, _TerminatedError) else 130
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_job(job: JobFile, event: QuantizeEvent) -> None:
    """Report an event to dashboards: stage, layer, time left, loss."""
    from statistics import fmean

    match event:
        case StepStarted():
            job.update(event.what, 0, 0)
        case Start():
            done, total = event.units_done, event.units
            job.update("trying the largest layer", 0, 0, parts_done=done, parts_total=total)
        case UnitFinished():
            job.update(
                QUANTIZING,
                event.bytes_done,
                event.bytes_total,
                seconds_left=event.remaining_seconds,
                part=event.name,
                parts_done=event.done,
                parts_total=event.total,
                loss=fmean(event.losses.values()) if event.losses else None,
            )
        case Written():
            job.update("finishing the files", 0, 0)
        case Measuring():
            done, total = event.done, event.total
            stage = f"quality card, {event.stage}"
            job.update(stage, done, total, parts_done=done, parts_total=total)
        case _:
            pass


def make_card_of_run(
    report: QuantizeReport,
    base: Path,
    tokens: int,
    max_ram: int | None,
    on_event: OnEvent,
    pictures: Path | None = None,
) -> None:
    """Save a run's facts beside its weights, then measure these and write their card.

    The weights are already safe. If this fails or is killed, `appliance evaluate` makes the same
    card later.

    Args:
        base: the unquantized model.
        tokens: number to measure on; 0 makes no card.
        max_ram: limit of the process's memory in bytes; None takes the free memory.
        pictures: folder of them, as of `CardOptions`.
    """
    from appliance.progress.progress import ProgressLine
    from appliance.progress.quantize_events import CardWritten, Measuring
    from appliance.quant.quality.card import HTML_NAME, beside
    from appliance.quant.quality.card_files import write_card
    from appliance.quant.quality.facts import keep_facts
    from appliance.quant.quality.make_card import CardOptions, make_card
    from appliance.quant.run.evaluation_memory import CARD_WINDOW
    from appliance.quant.text.held_out import HeldOutText

    try:
        keep_facts(report)
        if not tokens:
            return
        text = HeldOutText(None, tokens, min(CARD_WINDOW, tokens))
        options = CardOptions(text=text, max_ram=max_ram, pictures=pictures)
        with ProgressLine() as progress:

            def tell(stage: str, done: int, total: int) -> None:
                progress(stage, done, total)
                on_event(Measuring(stage=stage, done=done, total=total))

            card = make_card(report.out, base, options, on_progress=tell)
        path = write_card(card, report.out)
    except ApplianceError as error:
        typer.echo(
            f"note: the weights are done, but there is no quality card: {error}; make one with:"
            f" appliance evaluate {report.out} --against {base}",
            err=True,
        )
        return
    if card.comparison is not None:
        on_event(
            CardWritten(
                path=str(path),
                kld_mean=card.comparison.kld_mean.value,
                same_top_percent=card.comparison.same_top_percent.value,
            )
        )
    typer.echo(f"quality: {card.line()}", err=True)
    others = [(f"a KV cache of {row.format}", row.comparison) for row in card.kv]
    if card.prompt_int8 is not None:
        others.append(("prompts in int8", card.prompt_int8))
    for name, found in others:
        typer.echo(
            f"  with {name}: mean KLD {found.kld_mean.value:.4f} more,"
            f" same top {found.same_top_percent.value:.1f} %",
            err=True,
        )
    typer.echo(
        f"the card: {beside(report.out, HTML_NAME)}, or: appliance card {report.out}", err=True
    )
