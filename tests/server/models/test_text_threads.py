"""Clients share the threads that process texts, whoever has most of the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.runs.waiting import until

from appliance.server.models import text_threads
from appliance.server.models.text_threads import SHORT, TextThreads, TextTimeoutError

LONG = SHORT + 1


@pytest_asyncio.fixture
async def threads() -> AsyncIterator[TextThreads]:
    made = TextThreads()
    yield made
    made.close()


class Gate:
    """Work that waits until it may end, and records its starts."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(30)
        return name


async def test_long_texts_of_one_client_never_hold_up_short_ones(threads: TextThreads) -> None:
    gate = Gate()
    long = [
        asyncio.create_task(threads.run(lambda: gate.work("long"), owner="ann", size=LONG))
        for _ in range(5)
    ]
    await until(lambda: len(gate.begun) == 2)
    for owner in ("ann", "bob", ""):
        assert await threads.run(lambda: "short", owner=owner, size=SHORT) == "short"
    assert len(gate.begun) == 2, "the third thread takes none of them"
    gate.open.set()
    assert await asyncio.gather(*long) == ["long"] * 5


async def test_clients_take_turns(threads: TextThreads) -> None:
    gate = Gate()
    names = ["ann"] * 20 + ["bob"] * 2 + ["eve"]
    tasks = [
        asyncio.create_task(threads.run(lambda one=name: gate.work(one), owner=name, size=LONG))  # type: ignore[misc]
        for name in names
    ]
    await until(lambda: len(gate.begun) == 2)
    gate.open.set()
    await asyncio.gather(*tasks)
    # The client with twenty is served as often as the others while those have work.
    assert set(gate.begun[2:5]) == {"ann", "bob", "eve"}
    assert gate.begun.index("eve") < 6
    assert sorted(gate.begun) == sorted(names)


async def test_nobody_waits_without_end(
    threads: TextThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "MOST_SECONDS", 0.05)
    gate = Gate()
    for name in ("running", "running too", "waiting"):
        with pytest.raises(TextTimeoutError) as late:
            await threads.run(lambda one=name: gate.work(one), owner="ann", size=LONG)  # type: ignore[misc]
        assert (late.value.status, late.value.code) == (503, "text_timeout")
    gate.open.set()
    monkeypatch.setattr(text_threads, "MOST_SECONDS", 30.0)
    await threads.run(lambda: gate.work("next"), owner="ann", size=LONG)
    assert "waiting" not in gate.begun, "what nobody awaits is not begun"


async def test_an_error_is_its_own_requests(threads: TextThreads) -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await threads.run(fail, owner="ann", size=0)
    assert await threads.run(lambda: 1, owner="ann", size=0) == 1
