"""GPUs by the names that people type, with their makers' figures; imports nothing that computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.config.setting import nearest
from appliance.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU model with its maker's figures: memory in GiB, and peak read bandwidth in GB/s."""

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

_WORDS = re.compile(r"nvidia|geforce|tesla|\(r\)|\(tm\)|graphics|[^a-z0-9]")
_COUNT = re.compile(r"(\d) ?[xX*\u00d7] ?")
_OTHERS = (
    (
        re.compile(
            r"quadro|gtx\d+|titan|(rtx)?20[5678]0|t4$|t4g|p4$|p40|p100|p\d000|v100|[mk]\d\d$"
            r"|gt\d{3,4}|mx\d{3}|t\d00"
        ),
        "is older than compute capability 8.0 (Ampere), which the kernels need",
    ),
    (re.compile(r"rx\d{3,4}|radeon|instinct|mi\d{2,3}|vega|strix|gfx\d|amd"), "is AMD's"),
    (re.compile(r"m[1-9](pro|max|ultra)?$|apple"), "is Apple's"),
    (re.compile(r"arc|[ab][35][57789]0|intel"), "is Intel's"),
)
_INSTEAD = (
    "; the CPU of its machine would serve the model: appliance fit without --gpu says how, there"
)


def gpu_named(name: str) -> KnownGpu:
    """Find a GPU by name, ignoring maker, spaces and case; RTX may be left out.

    Raises:
        ConfigError: the table lacks it, or has several of the name; the message says which, or why
            no such GPU is served.
    """
    known = {_plain(gpu.name): gpu for gpu in _TABLE}
    word = _plain(name)
    if word and (found := known.get(word) or known.get(f"rtx{word}")) is not None:
        return found
    for pattern, reason in _OTHERS:
        if pattern.match(word):
            raise ConfigError(f"{name} {reason}, and is not served{_INSTEAD}")
    several = [gpu.name for plain, gpu in known.items() if word and plain.startswith(word)]
    if several:
        raise ConfigError(f"{name!r} is {' or '.join(map(repr, several))}; name one of them")
    close = nearest(name, [gpu.name for gpu in _TABLE])
    raise ConfigError(f"no GPU {name!r} is in the table{close}")


def counted(name: str) -> tuple[int, str]:
    """Split "2x RTX 3090" into the number of cards and their name."""
    found = _COUNT.match(name.strip())
    return (int(found[1]), name.strip()[found.end() :]) if found else (1, name)


def _plain(name: str) -> str:
    return _WORDS.sub("", name.lower())
