"""Long-lived parts restart after a failure, or their owner is told."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.runs.waiting import LIMIT, until

from appliance import long_lived
from appliance.long_lived import start_task, start_thread, tell


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_lived, "PAUSE_SECONDS", 0.0)


class Work:
    """Fails so many times, then runs until it is ended."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.goes_on = threading.Event()

    def begin(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise ValueError(f"{self.left} are left")
        self.goes_on.set()

    async def run(self) -> None:
        self.begin()
        await asyncio.Event().wait()


async def test_a_task_starts_again_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(3)
    task = start_task(work.run, "steady")
    await until(work.goes_on.is_set)
    assert caplog.text.count("the task steady failed; it starts again") == 3
    assert "0 are left" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert work.left == -1


@pytest.mark.parametrize("fails", [True, False])
async def test_an_owner_is_told_of_an_end_and_not_of_cancellation(fails: bool) -> None:
    told: list[Exception | None] = []

    async def ends() -> None:
        if fails:
            raise ValueError("why")

    await start_task(ends, "ending", told.append)
    assert [str(one) for one in told] == ["why" if fails else "None"]
    task = start_task(Work(0).run, "cancelled", told.append)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(told) == 1


def test_a_thread_starts_again_and_may_return(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(2)
    start_thread(work.begin, "steady").join(LIMIT)
    assert work.goes_on.is_set()
    assert caplog.text.count("the thread steady failed; it starts again") == 2


def test_all_observers_are_told_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def fails(number: int) -> None:
        raise ValueError(number)

    tell([fails, heard.append], 5)
    assert heard == [5]
    assert "failed" in caplog.text
