"""Collects a server's API keys from settings and key file, and the commands' own key."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.config.api_keys import ApiKey, check_keys, read_keys
from appliance.config.server_section import ServerConfig
from appliance.config.setting import fields_of
from appliance.errors import ConfigError

KEY_VARIABLE = fields_of(ServerConfig)["api_key"].variable


def api_key_from_environment() -> str | None:
    """Return the key that commands send to a server."""
    return os.environ.get(KEY_VARIABLE) or None


def key_file(server: ServerConfig) -> Path | None:
    return None if server.api_key_file is None else Path(server.api_key_file).expanduser()


def known_keys(server: ServerConfig) -> dict[str, ApiKey]:
    """Return a server's keys from settings and key file, by name; empty if it needs none.

    Raises ConfigError if the key file is unreadable or invalid, or repeats a name.
    """
    mine = check_keys(server.api_key, server.api_keys)
    if (path := key_file(server)) is None:
        return mine
    read = read_keys(path)
    if twice := sorted(read.keys() & mine.keys()):
        raise ConfigError(f"{path}: {twice[0]!r} has an API key already, in the settings")
    return check_keys(server.api_key, server.api_keys | read)


def own_key(server: ServerConfig) -> tuple[str | None, dict[str, str]]:
    """Return an administrator's key for a program that starts the server to watch it.

    Returns:
        The key, None if none is needed; and the environment that makes the server accept it. If all
        of several keys have names, or only digests are stored, it is an additional key.
    """
    keys, environment = known_keys(server), dict(os.environ)
    if not keys:
        return None, environment
    secret = next(iter(keys.values())).secret
    if secret is not None and (len(keys) == 1 or server.api_key):
        return secret, environment
    import secrets  # slow to import

    key = secrets.token_urlsafe(24)
    return key, environment | {KEY_VARIABLE: key}
