from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.process.supervisor import EngineState
from appliance.events import (
    BlockState,
    Delta,
    Event,
    Info,
    Sequences,
    Snapshot,
    Stats,
    decode_event,
    unpack_cell,
)
from appliance.server.admin import MAX_WATCHERS, Rates
from appliance.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.server.conftest import Running, Serve

EVENTS = "/admin/v1/events"


async def watch(running: Running) -> AsyncGenerator[Event, None]:
    async with running.http.stream("GET", EVENTS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                event = decode_event(name, line.removeprefix("data: "))
                assert event is not None
                yield event


class Map:
    """The blocks as a dashboard puts them together."""

    def __init__(self) -> None:
        self.epoch = 0
        self.cells: np.ndarray[tuple[int], np.dtype[np.uint32]] = np.zeros(0, dtype=np.uint32)

    def take(self, event: Event) -> None:
        if isinstance(event, Snapshot):
            self.epoch = event.epoch
            self.cells = np.frombuffer(event.words(), dtype="<u4").copy()
        elif isinstance(event, Delta) and event.epoch == self.epoch:
            for run in event.runs:
                self.cells[run.start : run.start + run.length] = run.cell

    def active(self) -> int:
        return sum(unpack_cell(int(c))[0] is BlockState.ACTIVE for c in self.cells)

    def owners(self) -> set[int]:
        return {owner for c in self.cells for _, _, _, owner in [unpack_cell(int(c))]} - {0xFFFF}


async def test_the_feed_tells_the_truth_about_blocks_and_sequences(serve: Serve) -> None:
    async with serve("step_seconds=0.01", max_num_seqs=2) as running:
        feed = watch(running)
        blocks = Map()
        first = [await anext(feed) for _ in range(4)]
        assert [type(event) for event in first] == [Info, Snapshot, Sequences, Stats]
        info = first[0]
        assert isinstance(info, Info)
        assert (info.model, info.state, info.num_blocks, info.restarts) == ("echo", "ready", 256, 0)
        blocks.take(first[1])
        assert blocks.active() == 0

        work = [asyncio.create_task(running.complete("a" * 100, max_tokens=300)) for _ in range(3)]
        last: dict[type[Event], Event] = {}

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(10):
                while not condition():
                    event = await anext(feed)
                    last[type(event)] = event
                    blocks.take(event)

        def busy() -> bool:
            sequences, stats = last.get(Sequences), last.get(Stats)
            return (
                isinstance(sequences, Sequences)
                and isinstance(stats, Stats)
                and len(sequences.sequences) == 3
                and {one.slot for one in sequences.sequences if one.slot} == blocks.owners()
                and stats.generation_tokens_per_second > 0
            )

        await until(busy)
        stats = last[Stats]
        assert isinstance(stats, Stats)
        assert (stats.requests_running, stats.requests_waiting) == (2, 1)
        assert stats.engine.running == 2
        assert stats.time_to_first_token.count == 2
        assert stats.inter_token_latency.p50 > 0.005
        assert blocks.active() >= 14
        for task in work:
            task.cancel()
        await until(lambda: blocks.active() == 0)
        await feed.aclose()


async def test_a_new_engine_is_a_new_epoch(serve: Serve) -> None:
    async with serve() as running:
        feed = watch(running)
        states = []
        assert running.state.engine.pid is not None
        async for event in feed:
            if isinstance(event, Info):
                states.append((event.state, event.restarts))
                if len(states) == 1:
                    os.kill(running.state.engine.pid, signal.SIGKILL)
            if isinstance(event, Snapshot) and event.epoch == 2:
                break
        assert states[0] == ("ready", 0)
        assert states[-1] == ("ready", 1)
        await feed.aclose()


async def test_watchers_are_limited_and_forgotten_when_they_leave(serve: Serve) -> None:
    async with serve() as running:
        feeds = [watch(running) for _ in range(MAX_WATCHERS)]
        for feed in feeds:
            await anext(feed)
        assert (await running.http.get(EVENTS)).status_code == 429
        await feeds.pop().aclose()

        async def admitted() -> bool:
            async with running.http.stream("GET", EVENTS) as response:
                return response.status_code == 200

        async with asyncio.timeout(5):
            while not await admitted():  # noqa: ASYNC110 - it looks at a server
                await asyncio.sleep(0.05)
        for feed in feeds:
            await feed.aclose()


async def test_watching_does_not_wake_an_idle_engine(serve: Serve) -> None:
    async with serve() as running:
        feed = watch(running)
        for _ in range(5):
            await anext(feed)
        assert running.state.engine.stats.steps_total == 0
        assert running.state.engine.state is EngineState.READY
        await feed.aclose()


def test_rates() -> None:
    rates = Rates()
    assert rates.update(EngineStats(prompt_tokens_total=10), 1.0) == (0.0, 0.0)
    stats = EngineStats(prompt_tokens_total=30, generation_tokens_total=5)
    assert rates.update(stats, 3.0) == (10.0, 2.5)
    assert rates.update(stats, 3.0) == (0.0, 0.0)
    assert rates.update(EngineStats(), 5.0) == (0.0, 0.0), "another engine starts at 0"


async def test_the_quality_card_is_served_as_it_is(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.http.get("/admin/v1/quality")
        assert (answer.status_code, answer.json()) == (200, None)
        running.state.quality = b'{"schema": 1}\n'
        assert (await running.http.get("/admin/v1/quality")).json() == {"schema": 1}
