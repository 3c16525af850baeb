"""Sampling that a model's makers recommend, for fields that requests leave open.

A leaf. Its input is untrusted, so it checks each value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# Fields of `SamplingParams` that a checkpoint may set, and their ranges.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
_DIGITS = 6  # GGUF files hold 32-bit floats, whose 0.95 is 0.949999988


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default sampling of requests; an empty one leaves it to `SamplingParams`.

    Attributes:
        values: by field name.
        source: where they come from, for display.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def read(cls, recommended: Mapping[str, object], source: str) -> SamplingDefaults:
        """Read the usable part of a checkpoint's recommendation; log the rest.

        Args:
            recommended: fields as in `generation_config.json`; reads those in `RANGES`.
            source: where they come from, for display.
        """
        values: dict[str, float] = {}
        # do_sample is false: greedy, despite any other value.
        if recommended.get("do_sample") is False:
            values["temperature"] = 0.0
            recommended = {"repetition_penalty": recommended.get("repetition_penalty")}
        for name, (low, high) in RANGES.items():
            value = recommended.get(name)
            if value is None:
                continue
            number = _number(value)
            if name == "top_k" and number == -1:  # disables it in transformers and vLLM
                number = 0.0
            if not low <= number <= high or (name == "top_k" and number % 1):
                logger.warning(
                    "%s recommends %s %.40r, which is not between %g and %g; it is ignored",
                    source,
                    name,
                    value,
                    low,
                    high,
                )
                continue
            values[name] = int(number) if name == "top_k" else number
        return cls(values, source if values else "")

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        """Format the values, such as "temperature 0.2, top_p 0.9"."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


NOTHING_RECOMMENDED = SamplingDefaults()


def choose_defaults(
    setting: str, own: SamplingDefaults, known: SamplingDefaults
) -> SamplingDefaults:
    return NOTHING_RECOMMENDED if setting == "off" else own or known


def _number(value: object) -> float:
    """Convert to a number; return NaN, which is in no range, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
    except OverflowError:
        return math.nan
