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
        Path | None, typer.Option(help="Text file or folder of them [Python's help topics].")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate with.")] = 8192,
    kv_bits: Annotated[
        float | None,
        typer.Option(help="Bits of a KV cache element, such as 8, 6 or 4.75: chosen by layer."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the rows of text.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
) -> None:
    """Quantize a model's weights into a compressed-tensors folder."""
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress import ProgressLine
    from appliance.quant.calibration import CalibrationText
    from appliance.quant.options import Method, QuantizeOptions
    from appliance.quant.pipeline import quantize_model
    from appliance.quant.scheme import WeightScheme

    if out is None:
        raise ConfigError("--out DIR is needed: the folder to write the quantized model to")
    options = QuantizeOptions(
        scheme=WeightScheme.parse(bits=bits, group_size=group_size, symmetric=symmetric),
        method=Method.parse(method),
        text=CalibrationText(calibration, calibration_tokens, seed=seed),
        overwrite=overwrite,
        kv_bits=kv_bits,
    )
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        report = quantize_model(
            resolved.path,
            out,
            options,
            on_progress=progress,
        )
    typer.echo(report.summary(), err=True)
    typer.echo(f"serve it with: appliance serve {out}", err=True)
