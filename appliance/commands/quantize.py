"""`appliance quantize`: a model's weights in fewer bits, as a folder that can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.errors import ConfigError


def quantize(
    model: Model = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist.")] = None,
    method: Annotated[
        str, typer.Option(help="rtn, search, fp8, int8 (no text needed), gptq, awq or awq+gptq.")
    ] = "rtn",
    bits: Annotated[int | None, typer.Option(help="3, 4 or 8 [4; 8 of fp8 and int8].")] = None,
    group_size: Annotated[
        str | None,
        typer.Option(
            help="Inputs that share a scale: 32, 64, 128 or channel [64; channel of fp8 and int8];"
            " block of fp8 is 128x128 weights."
        ),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option(help="No zero points: readable by transformers and vLLM.")
    ] = True,
    mixed: Annotated[
        float | None,
        typer.Option(help="Bits per weight, scales included, to spend where they matter most."),
    ] = None,
    head: Annotated[
        int, typer.Option(help="Bits of the head, 4, 8 or 16; of both ends if they are tied.")
    ] = 16,
    embedding: Annotated[
        int, typer.Option(help="Bits of the embedding of a model with a head of its own.")
    ] = 16,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file or folder of them [Python's help topics].")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate with.")] = 8192,
    seed: Annotated[int, typer.Option(help="Chooses the rows of text.")] = 0,
    format: Annotated[
        str, typer.Option(help="Of the files: compressed-tensors, awq or gptq.")
    ] = "compressed-tensors",
    engine: Annotated[
        str, typer.Option(help="Who quantizes: appliance, or autoawq or optimum if installed.")
    ] = "appliance",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    card: Annotated[
        bool, typer.Option(help="Measure the result on held-out text, and write its quality card.")
    ] = True,
    card_tokens: Annotated[int, typer.Option(help="Tokens to measure on.")] = 4096,
) -> None:
    """Quantize a model's weights into a folder that can be served."""
    from appliance.commands.quantize_card import make_card_of_run
    from appliance.config import cache_dir, jobs_dir
    from appliance.hub import resolve_model
    from appliance.jobs import JobFile
    from appliance.progress import ProgressLine
    from appliance.quant.calibration import CalibrationText
    from appliance.quant.options import (
        Engine,
        Method,
        QuantizeOptions,
        WeightFormat,
        choose_scheme,
    )
    from appliance.quant.pipeline import quantize_model

    if out is None:
        raise ConfigError("--out DIR is needed: the folder to write the quantized model to")
    chosen = Method.parse(method)
    options = QuantizeOptions(
        scheme=choose_scheme(chosen, bits, group_size, symmetric=symmetric),
        method=chosen,
        head=head,
        mixed=mixed,
        embedding=embedding,
        text=CalibrationText(calibration, calibration_tokens, seed=seed),
        format=WeightFormat.parse(format),
        engine=Engine.parse(engine),
        overwrite=overwrite,
    )
    name = f"quantize {Path(model).name or 'the default model'}"
    with ProgressLine() as progress, JobFile(jobs_dir(), name) as job:

        def tell(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            job.update(stage, done, total)

        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        report = quantize_model(
            resolved.path,
            out,
            options,
            on_progress=tell,
        )
    typer.echo(report.summary(), err=True)
    make_card_of_run(report, resolved.path, card_tokens if card else 0)
    typer.echo(f"serve it with: appliance serve {out}", err=True)
