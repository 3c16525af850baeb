"""Rates of a multiprocessor, and the time of programs that share a GPU.

Computed from data sheets and compiled code: nothing here was timed. Times are in clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 32  # of a warp
ISSUED = 4  # instructions of warps that a multiprocessor starts in a clock
# Assumed: what it takes to start and end a program and a launch, and the share of the shorter of
# two kinds of work that goes on beside the longer.
PROGRAM_CLOCKS = 1500
LAUNCH_CLOCKS = 3000
HIDDEN = 0.75


@dataclass(frozen=True, slots=True)
class ClockRates:
    """Work of a multiprocessor in a clock.

    Attributes:
        products: of 16-bit numbers on tensor cores, added in float32.
        byte_products: of int8 numbers, added in int32.
        memory_bytes: its share of the bandwidth.
    """

    products: int
    byte_products: int
    memory_bytes: float


# A100, RTX 3090, 4090, H200 and RTX 5090, at their boost clocks. Professional cards of 8.6 and 8.9
# add in float32 at twice the rate of these.
RATES = {
    80: ClockRates(1024, 2048, 13.4),
    86: ClockRates(256, 1024, 6.7),
    89: ClockRates(256, 1024, 3.1),
    90: ClockRates(2048, 4096, 19.9),
    120: ClockRates(256, 1024, 4.4),
}


def rates_of(capability: int) -> ClockRates:
    """Return the rates of a compute capability (86 is 8.6), or of the nearest that is known."""
    return RATES[120 if capability > 90 else max(known for known in RATES if known <= capability)]


def waves(programs: int, num_sms: int) -> int:
    """Return the programs of the busiest multiprocessor, which sets the time."""
    return -(-programs // num_sms)


def side_by_side(one: float, other: float) -> float:
    """Return the clocks of two kinds of work that hide most of each other."""
    return max(one, other) + (1 - HIDDEN) * min(one, other)
