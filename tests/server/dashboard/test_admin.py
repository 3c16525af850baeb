from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.runs.waiting import LIMIT, until
from support.server.block_cells import unpack_cell

from appliance.engine.process.supervisor import EngineState
from appliance.events import (
    BlockState,
    Delta,
    Event,
    Info,
    Job,
    Log,
    Sequences,
    Snapshot,
    Stats,
)
from appliance.log import MAX_RECENT, RecentWarnings
from appliance.progress.jobs import JobFile
from appliance.server.dashboard.admin import MAX_WATCHERS, accepts_gzip
from appliance.server.dashboard.watcher import LogFeed, SequenceRate, TokenRates
from appliance.server.models.model_state import ServedCard
from appliance.stats import EngineStats, LogLine
from tests.server.watching import EVENTS, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Serve


class Map:
    """The block map as a dashboard assembles it."""

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
        machine = first[3].machine if isinstance(first[3], Stats) else None
        assert machine is not None
        assert machine.engine_rss_bytes > 2**20
        assert machine.memory_total_bytes > machine.engine_rss_bytes
        info = first[0]
        assert isinstance(info, Info)
        assert (info.model, info.state, info.num_blocks, info.restarts) == ("echo", "ready", 256, 0)
        blocks.take(first[1])
        assert blocks.active() == 0

        work = [asyncio.create_task(running.complete("a" * 100, max_tokens=300)) for _ in range(3)]
        last: dict[type[Event], Event] = {}

        async def read_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(LIMIT):
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

        await read_until(busy)
        stats = last[Stats]
        assert isinstance(stats, Stats)
        assert (stats.requests_running, stats.requests_waiting) == (2, 1)
        assert stats.engine.running == 2
        assert stats.queue_wait.count == 2
        numbers = [step.number for step in stats.steps]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "each step is told once"
        assert max(step.sequences for step in stats.steps) == 2
        sequences = last[Sequences]
        assert isinstance(sequences, Sequences)
        assert {view.model for view in sequences.sequences} == {"echo"}
        assert not any(view.prompt for view in sequences.sequences), "prompts are not shown"
        assert stats.time_to_first_token.count == 2
        assert stats.inter_token_latency.p50 > 0.005
        assert blocks.active() >= 14
        for task in work:
            task.cancel()
        await read_until(lambda: blocks.active() == 0)
        await feed.aclose()


@pytest.mark.parametrize(
    ("header", "wanted"),
    [("", False), ("gzip", True), ("br, GZip;q=0.5", True), ("gzip;q=0", False), ("*", False)],
)
def test_who_can_unpack_is_sent_less(header: str, wanted: bool) -> None:
    assert accepts_gzip(header) is wanted


async def test_the_feed_is_compressed_for_those_who_can_unpack_it(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        work = [asyncio.create_task(running.complete(c * 99, max_tokens=300)) for c in "abcdefgh"]
        await until(lambda: len(running.engine.sequences) == 8)
        read: dict[str, tuple[int, int]] = {}
        for encoding in ("gzip", "identity"):
            async with running.http.stream(
                "GET", EVENTS, headers={"accept-encoding": encoding}
            ) as feed:
                assert feed.headers.get("content-encoding", "identity") == encoding
                text = ""
                async for piece in feed.aiter_text():
                    text += piece
                    if text.count("event: sequences") == 3:
                        break
                read[encoding] = feed.num_bytes_downloaded, len(text)
        for task in work:
            task.cancel()
        sent, size = read["gzip"]
        assert sent < size / 4
        sent, size = read["identity"]
        assert sent == size


async def test_a_new_engine_is_a_new_epoch(serve: Serve) -> None:
    async with serve() as running:
        feed = watch(running)
        states = []
        assert running.engine.pid is not None
        async for event in feed:
            if isinstance(event, Info):
                states.append((event.state, event.restarts))
                if len(states) == 1:
                    os.kill(running.engine.pid, signal.SIGKILL)
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

        await until(admitted)
        for feed in feeds:
            await feed.aclose()


async def test_watching_does_not_wake_an_idle_engine(serve: Serve) -> None:
    async with serve() as running:
        feed = watch(running)
        for _ in range(5):
            await anext(feed)
        assert running.engine.stats.steps_total == 0
        assert running.engine.state is EngineState.READY
        await feed.aclose()


async def test_warnings_of_the_engine_reach_every_watcher_once(serve: Serve) -> None:
    async with serve() as running:
        await running.complete("hi", max_tokens=3)
        for _ in range(2):
            feed = watch(running)
            lines: list[LogLine] = []
            async with asyncio.timeout(LIMIT):
                async for event in feed:
                    if isinstance(event, Log):
                        lines += event.lines
                    if isinstance(event, Stats) and lines:
                        break
            assert [line.message for line in lines] == ["the first step of an echo"]
            assert (lines[0].level, lines[0].source) == ("WARNING", "appliance.echo")
            await feed.aclose()


async def test_a_task_of_another_process_is_told_until_it_is_over(
    serve: Serve, tmp_path: Path
) -> None:
    async with serve() as running:
        running.server.jobs_folder = tmp_path
        feed = watch(running)
        told: list[tuple[str, int, bool]] = []
        with JobFile(tmp_path, "quantize tiny") as job:
            job.update("layers", 3, 30)
            async with asyncio.timeout(LIMIT):
                async for event in feed:
                    if isinstance(event, Job):
                        told.append((event.stage, event.done, event.ended))
                        if len(told) == 1:
                            job.__exit__(None, None, None)
                        else:
                            break
        assert told == [("layers", 3, False), ("layers", 3, True)]
        await feed.aclose()


def test_a_watcher_is_told_new_lines_only_and_as_many_as_are_kept() -> None:
    warnings = RecentWarnings()
    feed = LogFeed(warnings)

    def told() -> list[str]:
        log = feed.poll()
        return [] if log is None else [line.message for line in log.lines]

    def add(*messages: str) -> None:
        for message in messages:
            warnings.add(LogLine(time=0.0, level="ERROR", source="s", message=message))

    assert told() == []
    add("a", "b")
    assert told() == ["a", "b"]
    assert told() == []
    add("c")
    assert told() == ["c"]
    add(*map(str, range(MAX_RECENT + 5)))
    assert told() == [str(number) for number in range(5, MAX_RECENT + 5)]


def test_the_rate_of_a_sequence_follows_its_tokens() -> None:
    rate = SequenceRate()
    assert rate.update(0.0, 5) == 0.0
    assert rate.update(0.5, 10) == 10.0
    assert rate.update(0.5, 10) == 10.0, "the same report twice"
    assert 10.0 < rate.update(1.0, 20) < 20.0
    for second in range(2, 30):
        latest = rate.update(float(second), 20 * second)
    assert latest == pytest.approx(20.0, rel=1e-6)


def test_rates() -> None:
    rates = TokenRates()
    assert rates.update(EngineStats(prompt_tokens_total=10), 1.0) == (0.0, 0.0)
    stats = EngineStats(prompt_tokens_total=30, generation_tokens_total=5)
    assert rates.update(stats, 3.0) == (10.0, 2.5)
    assert rates.update(stats, 3.0) == (0.0, 0.0)
    assert rates.update(EngineStats(), 5.0) == (0.0, 0.0), "another engine starts at 0"


async def test_the_quality_card_is_served_as_it_is(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.http.get("/admin/v1/quality")
        assert (answer.status_code, answer.json()) == (200, None)
        running.state.quality_card = ServedCard(b'{"schema": 1}\n', ())
        assert (await running.http.get("/admin/v1/quality")).json() == {"schema": 1}
