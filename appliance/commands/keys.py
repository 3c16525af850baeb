"""`appliance keys`: lists API keys and makes new ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from appliance.config import ServerConfig, key_file, known_keys, load_section
from appliance.config.api_keys import KeyLimits, check_keys, new_entry, read_keys, show_limits
from appliance.errors import ConfigError

keys = typer.Typer(no_args_is_help=True, help="List API keys, or make a new one.")

File = Annotated[
    Path | None, typer.Option("--api-key-file", help="The key file, if not the configured one.")
]


@keys.command()
def ls(api_key_file: File = None) -> None:
    """List the names of all keys, and their limits."""
    found = known_keys(_server(api_key_file))
    if not found:
        typer.echo("no key is needed; whoever reaches the server may use it")
    width = max(map(len, found), default=0)
    for name, key in found.items():
        typer.echo(f"{name.ljust(width)}  {show_limits(key.limits)}".rstrip())


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    requests: Annotated[int | None, typer.Option(help="Most requests a minute.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens a minute, read or written.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(help="Most requests at once.")] = None,
    priority: Annotated[int, typer.Option(help="Lower is served earlier.")] = 0,
    api_key_file: File = None,
) -> None:
    """Make a key, print it once, and write its digest into the key file.

    A server that runs with this file lets it in within a second.
    """
    server = _server(api_key_file)
    path = key_file(server)
    if path is None:
        raise ConfigError("there is no key file; name one with --api-key-file, here and for serve")
    secret, entry = new_entry(KeyLimits(requests, tokens, parallel, priority))
    present = read_keys(path) if path.exists() else {}
    _check_new(server, present, name, entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "rb+") as file:
        before = file.read()
        gap = b"" if not before or before.endswith(b"\n") else b"\n"
        file.write(gap + f"{name}={entry}\n".encode())
    typer.echo(secret)
    typer.echo(f"this is the only time that it is shown; its digest is in {path}", err=True)


def _server(path: Path | None) -> ServerConfig:
    return load_section(ServerConfig, {"api_key_file": None if path is None else str(path)})


def _check_new(server: ServerConfig, present: dict[str, str], name: str, entry: str) -> None:
    """Refuse, with a ConfigError, an entry that the server would refuse."""
    if name in present or name in server.api_keys:
        raise ConfigError(f"{name!r} has a key already; take its line out first")
    check_keys(server.api_key, server.api_keys | present | {name: entry})
