"""The effect of a failed measurement on the process that makes it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from bench.gpu import rows as rows_module
from bench.gpu.rows import Contender, Rows, Work
from bench.gpu.supervisor import START_AGAIN
from bench.gpu.timing import Bench

WORK = Work("kernel", "shape", {"m": 1}, 100)


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """Leave little garbage: each row collects it, which takes a second after other files' tests."""
    gc.freeze()


def raising(error: Exception) -> Any:
    def calls() -> Any:
        raise error

    return calls


@pytest.mark.parametrize(
    ("who", "error", "works", "ends"),
    [
        ("a peer", RuntimeError("no available kernel"), True, False),
        ("a peer", RuntimeError("illegal address"), False, True),
        ("ours", RuntimeError("illegal address"), True, True),
        ("ours", torch.OutOfMemoryError("too much"), True, False),
        ("ours", ValueError("a shape"), True, False),
    ],
)
def test_a_process_ends_where_the_gpu_may_be_of_no_use(
    monkeypatch: pytest.MonkeyPatch, who: str, error: Exception, works: bool, ends: bool
) -> None:
    monkeypatch.setattr(rows_module, "gpu_works", lambda: works)
    told: list[dict[str, Any]] = []
    bench = Bench(torch.device("cuda", 0), 1, 1.0)
    rows = Rows(bench, lambda **message: told.append(message))
    contender = Contender(who, raising(error))
    if ends:
        with pytest.raises(SystemExit, match=str(START_AGAIN)):
            rows.measure(WORK, contender)
    else:
        rows.measure(WORK, contender)
    assert str(error) in told[-1]["row"]["failed"]


def test_a_wrong_result_is_not_timed() -> None:
    told: list[dict[str, Any]] = []
    bench = Bench(torch.device("cpu"), 1, 1.0)

    def judge(error: float, call: object) -> tuple[float, float]:
        return error, 1.0

    for error in (2.0, float("nan"), 0.5):
        contender = Contender("ours", lambda: [lambda: None], partial(judge, error))
        Rows(bench, lambda **message: told.append(message)).measure(WORK, contender)
    found = [message["row"] for message in told if "row" in message]
    assert ["us" in row for row in found] == [False, False, True]
    assert ["failed" in row for row in found] == [True, True, False]
