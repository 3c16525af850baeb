"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from appliance.errors import ConfigError


def parse_size(text: str) -> int:
    """Bytes of a size such as 512MiB, 2G or 1.5GB; G and GiB are 2**30, GB is 10**9.

    Raises:
        ConfigError: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 512MiB or 2GiB")
    number, prefix, unit = match.groups()
    base = 1000 if unit == "b" and prefix else 1024
    return int(float(number) * base ** " kmgt".index(prefix or " "))
