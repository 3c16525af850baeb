"""Finds the server that a command talks to, from flags and settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.config import TopConfig, authority_to_trust, load_section, server_to_watch
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.doctor.server_facts import ServerFacts
    from appliance.tui.server import Server

Url = Annotated[
    str | None,
    typer.Option(help="The server, if not the configured one.", show_default=False),
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file that the server was started with.", show_default=False),
]


def asked_server(url: str | None, config: Path | None) -> Server:
    """Return the server that the flags name, else the configured one, with its key.

    Raises:
        ConfigError: a setting is unusable.
    """
    from appliance.tui.server import Server

    top = load_section(TopConfig, {"url": url}, config)
    address, key = server_to_watch(top.url, config)
    return Server.at(address, key, authority_to_trust(top, config))


def require_models(server: Server, facts: ServerFacts) -> None:
    """Raise ConfigError if a server does not answer, refuses the key, or serves no model."""
    if facts.problem is not None:
        raise ConfigError(
            f"no answer from {server.url}: {facts.problem}; start a server with `appliance serve`,"
            " or name another with --url"
        )
    if facts.status in (401, 403):
        raise ConfigError(
            f"{server.url} refuses the key ({facts.status}); set APPLIANCE_API_KEY to one that it"
            " knows"
        )
    if not facts.models:
        raise ConfigError(
            f"{server.url} answered {facts.status} and lists no model: {facts.health}"
        )
