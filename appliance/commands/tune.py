"""`appliance tune`: times on its GPUs how the kernels of a model are launched best."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.commands.model_argument import Model
from appliance.config import EngineConfig, cache_dir, load_section
from appliance.errors import ConfigError
from appliance.wording import age_in_words, counted


def tune(
    model: Model = "",
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Longest time to measure for.")
    ] = 120.0,
    show: Annotated[bool, typer.Option("--show", help="List what is kept instead.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what is kept instead.")] = False,
) -> None:
    """Time the launches of a model's linears, experts and attention on the GPU; keep the fastest.

    A start does the same for about five seconds, until all of a model is timed (setting `tune`).
    Until then choices are computed from tables and a model of the card. What is kept counts for one
    card, driver, torch, Triton and version of ours. Nothing else should run on the GPU meanwhile.
    """
    if show and forget:
        raise ConfigError("--show and --forget were given; leave one out")
    if show or forget:
        _kept(forget=forget)
        return
    _time(model, seconds)


def _kept(*, forget: bool) -> None:
    from appliance.engine.load.tuning import kept_files

    files = kept_files()
    if not files:
        typer.echo("nothing was timed here: all choices are computed")
    for kept in files:
        about, age = kept.circumstances, age_in_words(kept.age)
        words = f"{about.card}: {counted(kept.count, 'choice')} of {len(kept.choices)} forms"
        words += f" of work, {age}, driver {about.driver}, torch {about.torch},"
        words += f" triton {about.triton}"
        if forget:
            kept.path.unlink(missing_ok=True)
            words = f"deleted: {words}"
        elif kept.is_stale:
            words += "; ignored: another version is installed now"
        typer.echo(words)


def _time(model: str, seconds: float) -> None:
    from appliance.engine.load.tuning import tune_model
    from appliance.hub import resolve_model
    from appliance.progress.progress import ProgressLine

    settings = load_section(EngineConfig, {})
    with ProgressLine() as progress:
        found = resolve_model(model or settings.model, cache_dir=cache_dir(), progress=progress)
        settings = load_section(EngineConfig, {"model": str(found.path)})
        words = tune_model(settings, seconds, progress)
    typer.echo(words)
