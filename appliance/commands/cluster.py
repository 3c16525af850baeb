"""`appliance cluster`: serves a model on several machines, through Ray Serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from appliance.commands.model_argument import Model
from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import EngineConfig, ServerConfig, load_settings
from appliance.errors import ConfigError

cluster = typer.Typer(
    no_args_is_help=True,
    help="Serve a model on several machines, through Ray Serve.",
)

Address = Annotated[
    str | None,
    typer.Option("--address", help="Of the Ray cluster; without it, the one on this machine."),
]


@cluster.command()
@with_setting_flags(EngineConfig, ServerConfig)
def serve(
    flags: Flags,
    model: Model = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with these settings.", show_default=False)
    ] = None,
    address: Address = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Let the load decide how many replicas there are."),
    ] = None,
) -> None:
    """Serve a model on the nodes of a Ray cluster, or change how it is served, without a pause."""
    from appliance import log
    from appliance.cluster.control import start

    flags = dict(flags)
    flags["model"] = model or flags["model"]
    settings = load_settings(flags, config)
    log.configure(settings.server.log_level, settings.server.log_format)
    url = start(settings, None if autoscale is None else _bounds(autoscale), address)
    typer.echo(
        f"  endpoint   {url}/v1\n  replicas   appliance cluster status\n"
        "  end        appliance cluster stop",
        err=True,
    )


@cluster.command()
def status(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the replicas: where each one's own server is, and what it does."""
    from appliance.cluster.control import reports

    found = sorted(reports(address), key=lambda one: (one.node, one.url))
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    for one in found:
        typer.echo(
            f"{one.url}  {one.state}  {one.sequences} sequences  hit rate {one.hit_rate:.0%}"
            f"  {one.restarts} restarts  pid {one.pid}"
        )


@cluster.command()
def stop(address: Address = None) -> None:
    """End the replicas once they have finished their open requests."""
    from appliance.cluster.control import stop as end

    typer.echo("the replicas have ended" if end(address) else "no replicas ran")


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--autoscale {text!r} is not MIN:MAX, such as 1:4")
    return int(low), int(high)
