"""`appliance repack`: converts a quantized model to another format, bit for bit, or to 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.errors import ConfigError


def repack(
    out: Annotated[
        Path, typer.Option(help="Folder to write, or file of format gguf; must not exist.")
    ],
    format: Annotated[
        str, typer.Option(help="Of the files: awq, gptq, gguf, or dense, which is 16 bits.")
    ],
    model: Model = "",
    base: Annotated[
        Path | None,
        typer.Option(
            help="Of format gguf: a GGUF file of the model, for settings and tokenizer.",
            show_default="the folder's own",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
) -> None:
    """Store a quantized model's codes in another format, without loss, or unpack them."""
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress.progress import ProgressLine
    from appliance.quant.repack import DENSE, repack_model
    from appliance.quant.run.options import WeightFormat

    form = None if format == DENSE else WeightFormat.parse(format)
    if form is WeightFormat.GGUF:
        _write_gguf(model, base, out, overwrite=overwrite)
        return
    if base is not None:
        raise ConfigError("--base is for --format gguf; leave it out")
    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        repacked = repack_model(
            resolved.path,
            out,
            form,
            overwrite=overwrite,
            on_progress=progress,
        )
    for note in repacked.notes:
        typer.echo(f"note: {note}", err=True)
    what = "16 bits"
    if repacked.store is not None:
        config = repacked.store.config({}, [], named=False)
        what = (
            f"{config['quant_method']}, {config['bits']} bits in groups of {config['group_size']}"
        )
    typer.echo(f"{out}: {what}; serve it with: appliance serve {out}", err=True)


def _write_gguf(model: str, base: Path | None, out: Path, *, overwrite: bool) -> None:
    from appliance.config import cache_dir
    from appliance.hub import resolve_model
    from appliance.progress.progress import ProgressLine
    from appliance.quant.gguf.repack import write_gguf

    with ProgressLine() as progress:
        resolved = resolve_model(model, cache_dir=cache_dir(), progress=progress)
        written = write_gguf(resolved.path, out, base, overwrite=overwrite, on_progress=progress)
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)
    types = ", ".join(f"{count} {kind}" for kind, count in written.types.items())
    typer.echo(f"{out}: {types}; serve it with: appliance serve {out}", err=True)
