"""`appliance repack`: converts a quantized model to another format, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.model_argument import Model


def repack(
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    format: Annotated[str, typer.Option(help="Of the files: awq or gptq.")],
    model: Model = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
) -> None:
    """Store a quantized model's codes in another format, without loss."""
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress import ProgressLine
    from appliance.quant.repack import repack_model
    from appliance.quant.run.options import WeightFormat

    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        repacked = repack_model(
            resolved.path,
            out,
            WeightFormat.parse(format),
            overwrite=overwrite,
            on_progress=progress,
        )
    for note in repacked.notes:
        typer.echo(f"note: {note}", err=True)
    config = repacked.store.config({}, [], named=False)
    typer.echo(
        f"{out}: {config['quant_method']}, {config['bits']} bits in groups of"
        f" {config['group_size']}; serve it with: appliance serve {out}",
        err=True,
    )
