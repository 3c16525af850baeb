"""The only way in which tests wait."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from support.runs import waiting
from support.runs.waiting import has_ended, until, wait_until


@pytest.mark.parametrize("needed", [0, 3])
async def test_a_wait_ends_with_what_the_condition_found(needed: int) -> None:
    looks: list[int] = []

    def look() -> str:
        looks.append(0)
        return "found" if len(looks) > needed else ""

    async def look_at_a_server() -> str:
        return look()

    assert wait_until(look) == "found"
    assert len(looks) == needed + 1
    looks.clear()
    assert await until(look) == "found"
    looks.clear()
    assert await until(look_at_a_server) == "found"
    assert len(looks) == needed + 1


async def test_a_wait_in_vain_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT", 0.0)
    with pytest.raises(AssertionError, match=r"in vain: .*lambda: 1 > 2"):
        wait_until(lambda: 1 > 2)
    with pytest.raises(AssertionError, match="in vain: a word"):
        await until(lambda: False, "a word")
    with pytest.raises(AssertionError, match="in vain: a log"):
        wait_until(lambda: False, lambda: "a log")


def test_a_process_that_nobody_collects_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = psutil.Process(process.pid)
    assert not has_ended(seen)
    assert process.stdin is not None
    process.stdin.close()
    wait_until(lambda: seen.status() == psutil.STATUS_ZOMBIE)
    assert has_ended(seen)
    assert process.wait() != 0
    assert has_ended(seen)
    assert not has_ended(psutil.Process())
