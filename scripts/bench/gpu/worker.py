"""Measure one suite, or compile a share of its kernels, in a supervised process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.supervisor import lead_a_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.gpu.plan import Suite, Wanted
    from bench.gpu.supervisor import Tell

ROOT = Path(__file__).parents[3]


def measure(suite: Suite, wanted: Wanted, replays: int, tell: Tell, done: frozenset[str]) -> None:
    """Measure the part of a suite that is not done."""
    from bench.gpu.rows import Rows
    from bench.gpu.timing import Bench, device_facts

    if not suite.compiles:  # another process of this suite may have the device to itself
        bench = Bench.unmeasured()
    else:
        bench = Bench.here(replays)
        tell(facts=device_facts(bench))
    _run(suite, wanted, Rows(bench, tell, done))


def compile_share(suites: Sequence[Suite], wanted: Wanted, index: int, count: int) -> None:
    """Launch a share of the suites' kernels once, so that Triton's cache holds them."""
    from bench.gpu.rows import Rows
    from bench.gpu.timing import Bench

    lead_a_group()
    for suite in suites:
        rows = Rows(Bench.to_compile(), lambda **message: None, share=(index, count))
        _run(suite, wanted, rows)


def facts(tell: Tell, done: frozenset[str]) -> None:
    """Report the device and its copy bandwidth."""
    from bench.gpu.timing import Bench, device_facts

    tell(row={"key": {}, **device_facts(Bench.here(1))})


def _run(suite: Suite, wanted: Wanted, rows: Any) -> None:
    if not rows.bench.is_gpu:  # bfloat16, which Triton's interpreter does not calculate with
        sys.path.append(str(ROOT / "tests" / "kernels" / "executed" / "plugins"))
        importlib.import_module("interpreter_arithmetic")
    importlib.import_module(suite.module).measure(rows, wanted)
