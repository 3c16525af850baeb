"""Measure one row at a time; a kernel whose result is wrong is not timed."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.supervisor import START_AGAIN, name_of

if TYPE_CHECKING:
    from bench.gpu.supervisor import Tell
    from bench.gpu.timing import Bench, Call

NOT_CHECKED = "not checked: another project's arithmetic and weights"


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to do, whoever does it.

    Attributes:
        kernel: the operation, such as "w4a16".
        shape: a name of the named shapes.
        size: what varies beside the shape, such as {"m": 16}.
        nbytes: that must be moved through device memory, each once.
        flops: that must be computed.
    """

    kernel: str
    shape: str
    size: dict[str, int]
    nbytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation of the work.

    Attributes:
        name: "ours", or a peer's.
        calls: makes the calls, each on its own operands.
        error: of the first call's result, and the bound that it must keep; None where there is
            nothing to compare with.
        captured: whether its calls can be captured in a graph.
    """

    name: str
    calls: Callable[[], list[Call]]
    error: Callable[[Call], tuple[float, float]] | None = None
    captured: bool = True


@dataclass
class Rows:
    """Measures rows and sends each to the supervisor.

    Attributes:
        bench: where.
        tell: gets `begin`, `row` and `end`, see `supervisor`.
        done: names of what is not measured again.
        share: a share's index and the number of shares. Makes our calls of that share once, which
            compiles their kernels, and measures nothing.
    """

    bench: Bench
    tell: Tell
    done: frozenset[str] = frozenset()
    share: tuple[int, int] | None = None
    num_prepared: int = 0

    def prepare(
        self,
        kernel: str,
        shape: str,
        size: dict[str, int],
        measure: Callable[[], None],
        who: str = "ours",
    ) -> None:
        """Make operands and measure with them; an exception counts as a failure of `who`."""
        key = {"kernel": kernel, "shape": shape, **size, "who": who, "stage": "prepare"}
        if not self._is_wanted(key):
            return
        self.tell(begin=key)
        try:
            measure()
        except Exception as error:
            self._failed({"key": key}, error)
        self.tell(end=key)

    def measure(self, work: Work, contender: Contender) -> None:
        """Check, then time; a wrong result or an exception becomes a row without a time."""
        if self.share is not None:
            if contender.name == "ours":
                contender.calls()[0]()
            return
        key = {"kernel": work.kernel, "shape": work.shape, **work.size, "who": contender.name}
        self._find(key, lambda row: self._time(row, work, contender))
        gc.collect()  # the operands
        if self.bench.is_gpu:
            torch.cuda.empty_cache()

    def note(self, key: dict[str, Any], find: Callable[[], dict[str, Any]]) -> None:
        """Record a result that is not a time; an exception becomes a row that says so."""
        if self._is_wanted(key):
            self._find(key, lambda row: row.update(find()))

    def _is_wanted(self, key: dict[str, Any]) -> bool:
        self.num_prepared += 1
        if self.share is not None:
            return self.num_prepared % self.share[1] == self.share[0]
        return name_of(key) not in self.done

    def _find(self, key: dict[str, Any], fill: Callable[[dict[str, Any]], None]) -> None:
        if self.share is None and name_of(key) in self.done:
            return
        row: dict[str, Any] = {"key": key}
        self.tell(begin=key)
        begin = time.perf_counter()
        try:
            fill(row)
            row["took_seconds"] = round(time.perf_counter() - begin, 2)
        except Exception as error:  # whatever a peer's package throws
            self._failed(row, error)
        else:
            self._say(row)

    def _say(self, row: dict[str, Any]) -> None:
        print(in_words(row), file=sys.stderr, flush=True)
        self.tell(row=row)

    def _failed(self, row: dict[str, Any], error: Exception) -> None:
        """Record a failure, and end the process if the GPU may be unusable after it.

        A launch of ours that failed may have left counters behind that the next one believes; a
        peer that refuses a step has launched nothing.
        """
        row["failed"] = f"{type(error).__name__}: {error}"[:600]
        launched = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        harmful = launched and row["key"].get("who") == "ours"
        if not self.bench.is_gpu or (not harmful and gpu_works()):
            self._say(row)
            return
        print(in_words(row), file=sys.stderr, flush=True)
        self.tell(row=row)
        raise SystemExit(START_AGAIN)

    def _time(self, row: dict[str, Any], work: Work, contender: Contender) -> None:
        calls = contender.calls()
        if contender.error is None:
            row["error"] = NOT_CHECKED
        else:
            error, bound = contender.error(calls[0])
            row |= {"error": float(f"{error:.3g}"), "error_bound": float(f"{bound:.3g}")}
            if not error <= bound:  # also if it is NaN
                row["failed"] = "its result is wrong, so it is not timed"
                return
        times = self.bench.microseconds(calls, captured=contender.captured)
        seconds = times["median"] / 1e6
        row["us"] = times
        row["gb_per_second"] = round(work.nbytes / seconds / 1e9, 1)
        row["share_of_copy"] = round(work.nbytes / seconds / self.bench.copy_bandwidth, 3)
        if work.flops:
            row["tflop_per_second"] = round(work.flops / seconds / 1e12, 2)


def gpu_works() -> bool:
    """Return True if the GPU still computes."""
    try:
        torch.cuda.synchronize()
        return int(torch.ones(2, device="cuda").sum()) == 2
    except RuntimeError:
        return False


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||, in float64."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def in_words(row: dict[str, Any]) -> str:
    """Format a row as a line for people."""
    what = " ".join(
        f"{name}={value}" if type(value) is int else str(value)
        for name, value in row["key"].items()
    )
    if "failed" in row:
        return f"{what}: FAILED: {row['failed']}"
    if "us" not in row:
        found = {name: value for name, value in row.items() if name != "key"}
        return f"{what}: {found}"
    return (
        f"{what}: {row['us']['median']:.2f} us, "
        f"{100 * row['share_of_copy']:.0f} % of copy, error {row['error']}"
    )
