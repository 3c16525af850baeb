"""Parses and formats values of settings: sizes, durations, lists of named paths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB, GIB = 2**20, 2**30

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def parse_size(text: str) -> int:
    """Parse a size such as 512MiB, 2G or 1.5GB into bytes; G and GiB are 2**30, GB is 10**9.

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*+([kmgt]?)(i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 512MiB or 2GiB")
    number, prefix, unit = match.groups()
    base = 1000 if unit == "b" and prefix else 1024
    return int(float(number) * base ** " kmgt".index(prefix or " "))


def parse_duration(text: str) -> float:
    """Parse a duration such as 30m, 12h or 2w into seconds, or raise ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write it like 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def show_size(count: float) -> str:
    """Format a size in the largest fitting unit, such as 200 GiB."""
    power = 0
    while power + 1 < len(_SIZES) and count >= 1024 ** (power + 1):
        power += 1
    return f"{count / 1024**power:.6g} {_SIZES[power]}"


def show_duration(seconds: float) -> str:
    """Format a duration in the largest unit that divides it, such as 10m."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


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
