"""`appliance quantize`: a model's weights in fewer bits, as a folder that can be served."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from appliance.commands.model_argument import Model
from appliance.commands.sizes import parse_size
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def quantize(
    model: Model = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist.")] = None,
    method: Annotated[
        str, typer.Option(help="rtn (no text needed), gptq, awq or awq+gptq.")
    ] = "rtn",
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    group_size: Annotated[
        str, typer.Option(help="Inputs that share a scale: 32, 64, 128 or channel.")
    ] = "64",
    symmetric: Annotated[
        bool, typer.Option(help="No zero points: readable by transformers and vLLM.")
    ] = True,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text file, folder of them, or hf:DATASET[:SPLIT[:COLUMN]] [Python's help topics]."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate with.")] = 8192,
    seed: Annotated[int, typer.Option(help="Chooses the rows of text.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    restart: Annotated[
        bool, typer.Option(help="Discard what an unfinished run for OUT left, and begin anew.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where layers compute: auto, cpu or cuda.")] = "auto",
    max_ram: Annotated[
        str | None, typer.Option(help="Most memory of the process, such as 6GiB [what is free].")
    ] = None,
    max_vram: Annotated[
        str | None, typer.Option(help="Most memory on the GPU [what is free].")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Try the largest layer, say what a run takes, write nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Events as lines of JSON on standard output.")
    ] = False,
) -> None:
    """Quantize a model's weights into a compressed-tensors folder.

    A run that is cut short keeps the layers it has done; the same command goes on from there.
    """
    if out is None:
        raise ConfigError("--out DIR is needed: the folder to write the quantized model to")
    from appliance.runtime import limit_spinning

    limit_spinning()

    from appliance.commands.quantize_display import choose_display, describe_plan
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress import ProgressLine
    from appliance.quant import pipeline
    from appliance.quant.calibration import CalibrationText
    from appliance.quant.options import Method, QuantizeOptions, choose_device
    from appliance.quant.scheme import WeightScheme
    from appliance.quantize_events import encode_event

    options = QuantizeOptions(
        scheme=WeightScheme.parse(bits=bits, group_size=group_size, symmetric=symmetric),
        method=Method.parse(method),
        text=CalibrationText.parse(calibration, calibration_tokens, seed=seed),
        overwrite=overwrite,
        restart=restart,
        device=choose_device(device),
        max_ram=None if max_ram is None else parse_size(max_ram),
        max_vram=None if max_vram is None else parse_size(max_vram),
    )
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
    if dry_run:
        plan = pipeline.dry_run(resolved.path, out, options)
        typer.echo(encode_event(plan).decode() if as_json else "\n".join(describe_plan(plan)))
        return
    with _interruptible(out), choose_display(as_json=as_json) as display:
        report = pipeline.quantize_model(resolved.path, out, options, display)
    typer.echo(report.summary(), err=True)
    typer.echo(f"serve it with: appliance serve {out}", err=True)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """End on Ctrl-C and SIGTERM with one line that says what was kept.

    Raises:
        typer.Exit: with 130 or 143.
    """
    from appliance.quant.pipeline import what_is_kept

    def terminate(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted; {what_is_kept(out)}", err=True)
        code = 143 if isinstance(error, _TerminatedError) else 130
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
