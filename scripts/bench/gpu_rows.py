"""What one measurement says, and the rule that nothing is timed that is not right."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpu_supervisor import START_AGAIN, name_of

if TYPE_CHECKING:
    from gpu_timing import Bench, Call

RESULTS = {
    "us",
    "failed",
    "error",
    "error_bound",
    "ours_as_multiple",
    "gb_per_second",
    "share_of_copy",
    "tflop_per_second",
}
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
    """Somebody who does it.

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
    """The measurements of one process; each is told to whoever keeps the results.

    Attributes:
        bench: where.
        tell: gets `begin` and `row`, see `gpu_supervisor`.
        done: names of what is not measured again.
        share: which of how many; our calls of that share are made once, and nothing is measured:
            that compiles their kernels.
    """

    bench: Bench
    tell: Callable[..., None]
    done: frozenset[str] = frozenset()
    share: tuple[int, int] | None = None
    num_prepared: int = 0

    def prepare(
        self, kernel: str, shape: str, size: dict[str, int], measure: Callable[[], None]
    ) -> None:
        """Make operands and measure with them; what fails on the way is a failure of ours."""
        key = {"kernel": kernel, "shape": shape, **size, "who": "ours"}
        begun = {**key, "stage": "prepare"}
        self.num_prepared += 1
        if self.share is not None and self.num_prepared % self.share[1] != self.share[0]:
            return
        if name_of(begun) in self.done:
            return
        self.tell(begin=begun)
        try:
            measure()
        except Exception as error:
            self._failed({**begun}, error)

    def measure(self, work: Work, contender: Contender) -> None:
        """Check, then time; a wrong result or an exception is a row without a time."""
        row: dict[str, Any] = {
            "kernel": work.kernel,
            "shape": work.shape,
            **work.size,
            "who": contender.name,
        }
        if self.share is not None:
            if contender.name == "ours":
                contender.calls()[0]()
            return
        if name_of(row) in self.done:
            return
        self.tell(begin=row)
        try:
            self._fill(row, work, contender)
        except Exception as error:  # whatever a peer's package throws
            self._failed(row, error)
        else:
            self._say(row)

    def _say(self, row: dict[str, Any]) -> None:
        print(_line(row), file=sys.stderr, flush=True)
        self.tell(row=row)
        gc.collect()
        if self.bench.is_gpu:
            torch.cuda.empty_cache()

    def _failed(self, row: dict[str, Any], error: Exception) -> None:
        """Say so, and end the process if the error may have left the GPU of no use to it."""
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
        harmless = not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)
        if not self.bench.is_gpu or (harmless and _works()):
            self._say(row)
            return
        print(_line(row), file=sys.stderr, flush=True)
        self.tell(row=row)
        raise SystemExit(START_AGAIN)

    def _fill(self, row: dict[str, Any], work: Work, contender: Contender) -> None:
        calls = contender.calls()
        if contender.error is None:
            row["error"] = NOT_CHECKED
        else:
            error, bound = contender.error(calls[0])
            row |= {"error": float(f"{error:.3g}"), "error_bound": float(f"{bound:.3g}")}
            if not error <= bound:  # NaN is not
                row["failed"] = "its result is wrong, so it is not timed"
                return
        times = self.bench.microseconds(calls, captured=contender.captured)
        seconds = times["median"] / 1e6
        row["us"] = times
        row["gb_per_second"] = round(work.nbytes / seconds / 1e9, 1)
        row["share_of_copy"] = round(work.nbytes / seconds / self.bench.copy_bandwidth, 3)
        if work.flops:
            row["tflop_per_second"] = round(work.flops / seconds / 1e12, 2)


def _works() -> bool:
    """Whether the GPU still does what it is asked for."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Into each peer's row, our speed as a multiple of its."""
    ours = {_contest(row): row for row in rows if row["who"] == "ours" and "us" in row}
    for row in rows:
        own = ours.get(_contest(row))
        if own is not None and row["who"] != "ours" and "us" in row:
            row["ours_as_multiple"] = round(row["us"]["median"] / own["us"]["median"], 3)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||, in float64."""
    return float((out.double() - expected).norm() / expected.norm())


def key_of(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured, without what was found."""
    return {name: value for name, value in row.items() if name not in RESULTS}


def _contest(row: dict[str, Any]) -> str:
    return name_of({**key_of(row), "who": ""})


def _line(row: dict[str, Any]) -> str:
    what = " ".join(str(value) for name, value in row.items() if name in ("kernel", "shape"))
    size = " ".join(
        f"{name}={value}"
        for name, value in row.items()
        if isinstance(value, int) and not isinstance(value, bool)
    )
    if "us" not in row:
        return f"{what} {size} {row['who']}: {row.get('failed')}"
    return (
        f"{what} {size} {row['who']}: {row['us']['median']:.2f} us, "
        f"{100 * row['share_of_copy']:.0f} % of copy, error {row['error']}"
    )
