"""`appliance fit`: says what a model needs, and how fast it would be at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from appliance.commands.model_argument import Model
from appliance.config import EngineConfig, cache_dir, load_section


def fit(
    model: Model = "",
    gpu: Annotated[
        str | None, typer.Option(help="A GPU that need not be here, such as 'RTX 3090'.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=16, help="Tokens; without it, as many as fit.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Whole contexts at once.")] = 1,
    images: Annotated[
        bool | None,
        typer.Option(
            "--images/--no-images",
            help="Count what the model reads pictures with.",
            show_default=False,
        ),
    ] = None,
    mmproj: Annotated[
        str, typer.Option(help="Projector file of a GGUF model.", show_default=False)
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the settings.", show_default=False)
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Measure this machine's memory.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Rank the ways to serve a model by what they need, before anything is downloaded.

    Of a hub's model only the headers are fetched. The plan is the one with which serve refuses or
    loads.
    """
    from appliance.engine.devices import unused_gpu
    from appliance.errors import CheckpointError
    from appliance.fit.candidates import candidates
    from appliance.fit.model import opened
    from appliance.fit.place import place_of
    from appliance.fit.table import as_data, as_table
    from appliance.quant.quality.card import card_of

    given = {"images": images, "mmproj": mmproj or None}
    settings = load_section(EngineConfig, given, config)
    if gpu is None and (unused := unused_gpu(settings)):
        typer.echo(f"note: {unused}", err=True)
    if settings.draft_model or settings.eagle_head:
        typer.echo("note: what drafts is not counted", err=True)
        settings = msgspec.structs.replace(settings, speculate="auto")
    images = settings.images and not settings.mmproj
    drafts = settings.speculate in ("auto", "mtp")
    with opened(model or settings.model, cache_dir(), images=images, drafts=drafts) as found_model:
        name, source, path = found_model
        place = place_of(gpu, settings, measures=speed and not source.only_reads)
        found = candidates(source, settings, place, context_length=context, streams=streams)
    card = None
    try:
        card = None if path is None else card_of(path)
    except CheckpointError as error:
        typer.echo(f"warning: {error}", err=True)
    if as_json:
        typer.echo(json.dumps(as_data(found, place, name), indent=2))
    else:
        typer.echo(as_table(found, place, None if card is None else card.line(), name))
