"""Reads and writes lists of named paths, NAME=PATH,NAME=PATH."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def named_paths(text: str, setting: str) -> dict[str, str]:
    """Parse a list into paths by name.

    Args:
        setting: the setting's name, for messages.

    Raises:
        ConfigError: an entry has no name or no path, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, is_pair, path = (part.strip() for part in entry.partition("="))
        if not (name and is_pair and path):
            raise ConfigError(f"{setting} has {entry!r}; write NAME=PATH, such as sql=./sql-lora")
        if name in found:
            raise ConfigError(f"{setting} has the name {name!r} twice; give each its own")
        found[name] = path
    return found


def as_text(paths: Mapping[str, str]) -> str:
    """Write a list that `named_paths` reads."""
    return ",".join(f"{name}={path}" for name, path in paths.items())
