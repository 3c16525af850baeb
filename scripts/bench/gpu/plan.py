"""Suites in the order in which they are measured, and each one's share of the time.

Imports neither torch nor anything of the product, so that the process that supervises stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path


class Amount(Enum):
    """How much of its shapes a suite measures."""

    TINY = "tiny"  # a trial of the scripts on whatever device there is
    FIRST = "first"  # what the goals ask for: all suites together in one call of nine minutes
    FULL = "full"  # every named shape


@dataclass(frozen=True, slots=True)
class Suite:
    """One part of a run, measured in processes of its own.

    Attributes:
        name: as on the command line and in the results.
        seconds: its share of a call of nine minutes.
        patience: seconds without a message after which a measurement is given up.
        about: one line for people.
        compiles: whether it launches kernels of ours that can be compiled ahead.
        package: where the module of that name is.
    """

    name: str
    seconds: float
    patience: float
    about: str
    compiles: bool = False
    package: str = "bench.gpu"

    @property
    def module(self) -> str:
        """Module whose `measure` the suite runs."""
        return f"{self.package}.{self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a suite is told to measure.

    Attributes:
        amount: how much to measure.
        peers: whether other people's code is measured too.
        only: kernels, or phases of attention; empty is all.
        model: a folder or file of real weights.
    """

    amount: Amount
    peers: bool = True
    only: frozenset[str] = frozenset()
    model: Path | None = None


COMPILE = "compile"
REAL_MODEL = "real_model"
COMPILE_SECONDS = 65.0
# The most important first, as the end of a call may be cut off.
SUITES = (
    Suite("correctness", 50, 30, "every kernel beside its torch reference, and 1,000 reruns", True),
    Suite("matmul", 85, 30, "weight matmuls beside cuBLAS, torch's int4 and _scaled_mm", True),
    Suite("decode", 85, 45, "decode attention over each KV format beside SDPA and Flex", True),
    Suite("start", 45, 45, "first and second start of an 8B shape, in fresh processes"),
    Suite("engine", 70, 40, "the engine end to end: streams, graphs, idle share, memory"),
    Suite("peer_engine", 45, 45, "transformers' generate with a static cache, the engine's peer"),
    Suite("prefill", 35, 30, "attention of prompts", True),
    Suite("layer_ops", 25, 20, "norms, activations, cache writes and sampling", True),
    Suite(REAL_MODEL, 30, 30, "a real model's tokens beside the CPU's; needs --model"),
)
MINUTES = 9.0


def suite_named(name: str) -> Suite:
    return next(suite for suite in SUITES if suite.name == name)


def deadlines(seconds: Sequence[float], total: float) -> list[float]:
    """Return when each part of a run must end, in seconds from the start of the run.

    Each part has its share of the total, however long the parts before it would take; time that a
    part leaves goes to those after it.
    """
    scale = total / sum(seconds)
    return [scale * until for until in accumulate(seconds)]
