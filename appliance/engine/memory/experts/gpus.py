"""GPUs by name, with their makers' figures for memory and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.config.setting import nearest
from appliance.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU model: memory in GiB, and peak read bandwidth in GB/s."""

    name: str
    gib: float
    bandwidth: float


_TABLE = (
    KnownGpu("RTX 3060", 12, 360),
    KnownGpu("RTX 3060 Ti", 8, 448),
    KnownGpu("RTX 3070", 8, 448),
    KnownGpu("RTX 3070 Ti", 8, 608),
    KnownGpu("RTX 3080", 10, 760),
    KnownGpu("RTX 3080 Ti", 12, 912),
    KnownGpu("RTX 3090", 24, 936),
    KnownGpu("RTX 3090 Ti", 24, 1008),
    KnownGpu("RTX 4060", 8, 272),
    KnownGpu("RTX 4060 Ti", 8, 288),
    KnownGpu("RTX 4060 Ti 16GB", 16, 288),
    KnownGpu("RTX 4070", 12, 504),
    KnownGpu("RTX 4070 Super", 12, 504),
    KnownGpu("RTX 4070 Ti", 12, 504),
    KnownGpu("RTX 4070 Ti Super", 16, 672),
    KnownGpu("RTX 4080", 16, 717),
    KnownGpu("RTX 4080 Super", 16, 736),
    KnownGpu("RTX 4090", 24, 1008),
    KnownGpu("RTX 5060", 8, 448),
    KnownGpu("RTX 5060 Ti", 8, 448),
    KnownGpu("RTX 5060 Ti 16GB", 16, 448),
    KnownGpu("RTX 5070", 12, 672),
    KnownGpu("RTX 5070 Ti", 16, 896),
    KnownGpu("RTX 5080", 16, 960),
    KnownGpu("RTX 5090", 32, 1792),
    KnownGpu("RTX A4000", 16, 448),
    KnownGpu("RTX A5000", 24, 768),
    KnownGpu("RTX A6000", 48, 768),
    KnownGpu("RTX 6000 Ada", 48, 960),
    KnownGpu("RTX PRO 6000", 96, 1792),
    KnownGpu("L4", 24, 300),
    KnownGpu("A10", 24, 600),
    KnownGpu("A100 40GB", 40, 1555),
    KnownGpu("A100 80GB", 80, 2039),
    KnownGpu("H100", 80, 3350),
    KnownGpu("H200", 141, 4800),
)


def gpu_named(name: str) -> KnownGpu:
    """Find a GPU by name, ignoring maker, spaces and case.

    Raises:
        ConfigError: the table lacks it; the message lists the nearest names.
    """
    known = {_plain(gpu.name): gpu for gpu in _TABLE}
    found = known.get(_plain(name))
    if found is None:
        close = nearest(name, [gpu.name for gpu in _TABLE])
        raise ConfigError(f"no GPU {name!r} is in the table{close}")
    return found


def _plain(name: str) -> str:
    word = name.lower().replace("nvidia", "").replace("geforce", "")
    return "".join(letter for letter in word if letter.isalnum())
