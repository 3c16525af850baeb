"""The API keys of a server, from wherever they are, and the one that a client of ours sends."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.api_keys import ApiKey, check_keys, read_keys
from appliance.config.sections import ServerConfig
from appliance.config.setting import fields_of
from appliance.errors import ConfigError

KEY_VARIABLE = fields_of(ServerConfig)["api_key"].variable


def api_key_from_environment() -> str | None:
    """The key with which a client of ours talks to a server."""
    return os.environ.get(KEY_VARIABLE) or None


def key_file(server: ServerConfig) -> Path | None:
    """Where a server's key file lies, if it has one."""
    return None if server.api_key_file is None else Path(server.api_key_file).expanduser()


def known_keys(server: ServerConfig) -> dict[str, ApiKey]:
    """Name to key, of all that a server lets in: its settings' and its key file's, as it is now.

    Empty where no key is wanted.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    mine = check_keys(server.api_key, server.api_keys)
    if (path := key_file(server)) is None:
        return mine
    read = read_keys(path)
    if twice := sorted(read.keys() & mine.keys()):
        raise ConfigError(f"{path}: {twice[0]!r} has an API key already, in the settings")
    return check_keys(server.api_key, server.api_keys | read)


def own_key(server: ServerConfig) -> tuple[str | None, dict[str, str]]:
    """A key that manages everything, for whoever starts the server to watch it.

    Returns:
        The key, None where none is wanted; and the environment in which the server lets it in:
        where there are several keys and all have names, or only digests are stored, it is one more.
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
