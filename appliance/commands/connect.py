"""`appliance connect`: prints how to point a client at the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.asked_server import Config, Url, asked_server
from appliance.config import EngineConfig, ServerConfig, load_section, network_url
from appliance.config.setting import nearest
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.connect import Connection, Recipe

_OWN_KEY = "YOUR-KEY"  # for the reader to replace


def connect(
    name: Annotated[
        str | None, typer.Argument(help="The client; without one, the list of them.")
    ] = None,
    url: Url = None,
    config: Config = None,
    code: Annotated[
        bool, typer.Option("--code", help="Only the code, to write it to a file or to run it.")
    ] = False,
) -> None:
    """Print how to point a client at the server, with address, key and model filled in.

    The output holds your API key where one is needed. Model and context come from the server if it
    runs, otherwise from the settings.
    """
    from appliance.connect import RECIPES

    if name is None:
        width = max(map(len, RECIPES)) + 2
        for word, recipe in RECIPES.items():
            typer.echo(f"{word:{width}}{recipe.title}")
        typer.echo("\nappliance connect NAME prints the set-up of one.")
        return
    if name not in RECIPES:
        raise ConfigError(f"there is no set-up for {name!r}{nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    connection, notes = _connection(recipe, url, config)
    if code:
        if not (text := recipe.code(connection)):
            raise ConfigError(
                f"{recipe.title} is set up by hand; `appliance connect {name}` says how"
            )
        typer.echo(text)
    else:
        for step in recipe.steps(connection):
            typer.echo(f"{step.text}\n" + (f"\n{step.code}\n" if step.code else ""))
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _connection(
    recipe: Recipe, url: str | None, config: Path | None
) -> tuple[Connection, list[str]]:
    """Collect the values to fill in, and notes for the reader."""
    from appliance.connect import Connection
    from appliance.doctor.server_facts import ask_server

    server = asked_server(url, config)
    address, notes = str(server.url).rstrip("/"), []
    if url is None and recipe.is_elsewhere:
        settings = load_section(ServerConfig, {}, config)
        network = network_url(settings.host, settings.port, tls=settings.tls_cert is not None)
        if network is not None:
            address = network
        elif server.url.host in ("127.0.0.1", "localhost", "::1"):
            notes.append(
                f"{recipe.title} usually runs on another machine, and the server lets none in;"
                " start it with a key and --host 0.0.0.0"
            )
    facts = asyncio.run(ask_server(server))
    model = facts.models[0] if facts.models else _configured_model(config)
    if facts.problem:
        unknown = ", and its context is not known" if recipe.least_context else ""
        notes.append(
            f"no answer from {server.url}; the model's name is what the settings say{unknown}"
        )
    if facts.context_length and facts.context_length < recipe.least_context:
        notes.append(
            f"the server's context is {facts.context_length:,} tokens, which {recipe.title} fills"
            f" soon; serve a model that reads {recipe.least_context:,} or more (--max-model-len)"
        )
    key = server.headers.get("Authorization", "").removeprefix("Bearer ") or None
    if facts.status in (401, 403):
        key, refused = _OWN_KEY, "refuses this key" if key else "wants a key"
        notes.append(f"the server {refused}: put yours instead of {_OWN_KEY}")
    return Connection(address, model, key, facts.context_length), notes


def _configured_model(config: Path | None) -> str:
    """Return the model's id in the API of a server with these settings."""
    from appliance.hub.packaged import DEFAULT, PACKAGED

    served = load_section(ServerConfig, {}, config).served_model_name
    model = load_section(EngineConfig, {}, config).model or DEFAULT
    return served or (PACKAGED[model].title if model in PACKAGED else model)
