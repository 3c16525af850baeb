"""The API keys of a server, from wherever they are, and the one that a client of ours sends."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from appliance.api_keys import read_keys
from appliance.config.sections import ServerConfig
from appliance.config.setting import fields_of
from appliance.errors import ConfigError

KEY_VARIABLE = fields_of(ServerConfig)["api_key"].variable


def api_key_from_environment() -> str | None:
    """The key with which a client of ours talks to a server."""
    return os.environ.get(KEY_VARIABLE) or None


def with_key_file(server: ServerConfig) -> ServerConfig:
    """The same with the keys of its key file, if it has one.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if server.api_key_file is None:
        return server
    path = Path(server.api_key_file).expanduser()
    read = read_keys(path)
    if twice := sorted(read.keys() & server.keys().keys()):
        raise ConfigError(f"{path}: {twice[0]!r} has an API key already, in the settings")
    return msgspec.structs.replace(server, api_keys=server.api_keys | read)


def own_key(server: ServerConfig) -> tuple[str | None, dict[str, str]]:
    """A key that manages everything, for whoever starts the server to watch it.

    Returns:
        The key, None where none is wanted; and the environment in which the server lets it in:
        where there are several keys and all have names, it is one more.
    """
    keys, environment = server.keys(), dict(os.environ)
    if len(keys) < 2 or server.api_key:
        return next(iter(keys.values()), None), environment
    import secrets  # slow to import

    key = secrets.token_urlsafe(24)
    return key, environment | {KEY_VARIABLE: key}
