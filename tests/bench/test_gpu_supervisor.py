"""The process that stores a GPU benchmark's results survives whatever measures them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from support.runs import bench_worker
from support.runs.waiting import LIMIT

from bench.gpu.supervisor import Start, Supervisor, name_of


def supervise(
    *kinds: str,
    done: tuple[int, ...] = (),
    time_is_up: bool = False,
    work: Any = None,
    start: Start = "forkserver",
) -> tuple[str, list[dict[str, Any]], list[int]]:
    """Why it stopped, the rows, and how much was done at each start of a process.

    Args:
        kinds: the behaviour of each measurement.
        done: measurements that are already done.
        time_is_up: a hang uses up the whole time, not only the patience with it.
        work: replaces these measurements.
        start: how processes begin.
    """
    messages: list[dict[str, Any]] = []

    def take(message: dict[str, Any]) -> None:
        messages.append(message)
        if "hangs" in message and time_is_up:
            supervisor.deadline = time.monotonic()
        elif "hangs" in message:
            supervisor.patience = 0.1
        else:
            supervisor.patience = LIMIT

    supervisor = Supervisor(
        work=work or partial(bench_worker.work, kinds),
        take=take,
        done={name_of({"number": number}) for number in done},
        patience=LIMIT,
        deadline=time.monotonic() + 10 * LIMIT,
        start=start,
    )
    stopped = supervisor.run()
    rows = [message["row"] for message in messages if "row" in message]
    return stopped, rows, [message["facts"] for message in messages if "facts" in message]


def test_what_dies_or_hangs_costs_itself_alone() -> None:
    stopped, rows, starts = supervise("a", "dies", "spoils", "hangs", "b", done=(0,))
    assert stopped == ""
    assert [row["key"]["number"] for row in rows] == [1, 2, 3, 4]
    assert "ended with code -11" in rows[0]["failed"]
    assert "nothing was heard" in rows[2]["failed"]
    assert [row.get("found") for row in rows] == [None, "spoils", None, "b"]
    assert starts == [1, 2, 3, 4]


def test_a_process_of_its_own_from_the_start_is_no_different() -> None:
    stopped, rows, starts = supervise("dies", "b", start="spawn")
    assert stopped == ""
    assert "ended with code -11" in rows[0]["failed"]
    assert rows[1]["found"] == "b"
    assert starts == [0, 1]


def test_when_the_time_is_over_what_there_is_stays() -> None:
    stopped, rows, _ = supervise("a", "hangs", "b", time_is_up=True)
    assert stopped == "the time is over"
    assert [row["key"]["number"] for row in rows] == [0, 1]
    assert rows[1]["failed"] == "the time of its suite was over"


def test_a_process_that_measures_nothing_is_not_started_for_ever() -> None:
    assert supervise("spoils", "spoils", done=(0, 1))[:2] == ("", [])
    stopped, rows, _ = supervise("a", work=bench_worker.fail)
    assert stopped == "its process ends before it has measured anything"
    assert rows == []
