from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.events import (
    BlockRun,
    BlockTable,
    Delta,
    Job,
    Log,
    LogLine,
    Sequences,
    Snapshot,
    Stats,
)
from appliance.stats import StepView
from appliance.tui.state import (
    MAX_LOG_LINES,
    ConnectionChange,
    ConnectionPhase,
    DashboardState,
    FeedItem,
    reduce,
)
from tests.tui.conftest import CACHED, FREE, INFO, STATS, active, sequence, snapshot

NUM_BLOCKS = 40
LIVE = ConnectionChange(ConnectionPhase.LIVE)

cells = st.sampled_from([FREE, CACHED, active(1), active(2), active(3, 2)])
runs = st.integers(0, NUM_BLOCKS - 1).flatmap(
    lambda start: st.builds(BlockRun, st.just(start), st.integers(1, NUM_BLOCKS - start), cells)
)
steps = st.one_of(
    st.lists(runs, max_size=4).map(tuple),  # blocks that change
    st.sampled_from(
        ["snapshot", "restart", "lost", "stray", "stats", "sequences", "info", "log", "table"]
    ),
)


@given(st.lists(steps, max_size=40))
def test_any_interleaving_ends_at_the_truth(script: list[str | tuple[BlockRun, ...]]) -> None:
    truth, epoch = [FREE] * NUM_BLOCKS, 1
    state = reduce(DashboardState(), snapshot(truth, epoch))
    for step in script:
        items: list[FeedItem]
        match step:
            case tuple():
                for run in step:
                    truth[run.start : run.start + run.length] = [run.cell] * run.length
                items = [Delta(epoch=epoch, runs=step)]
            case "snapshot":
                items = [snapshot(truth, epoch)]
            case "restart":
                truth, epoch = [FREE] * NUM_BLOCKS, epoch + 1
                items = [snapshot(truth, epoch)]
            case "lost":
                # Only the next connection's snapshot shows what happened meanwhile.
                truth = [CACHED, *truth[1:]]
                items = [
                    ConnectionChange(ConnectionPhase.LOST, "cut", 1.0),
                    LIVE,
                    snapshot(truth, epoch),
                ]
            case "stray":
                items = [Delta(epoch=epoch + 7, runs=(BlockRun(0, NUM_BLOCKS, CACHED),))]
            case "stats":
                items = [STATS]
            case "sequences":
                items = [Sequences(sequences=(sequence(1),))]
            case "log":
                line = LogLine(time=1.0, level="ERROR", source="engine", message="ouch")
                items = [Log(lines=(line,) * 300)]
            case "table":
                items = [BlockTable(request_id="x", index=0, num_tokens=1, blocks=())]
            case _:
                items = [INFO]
        for item in items:
            state = reduce(state, item)
        assert state.blocks is not None
        assert state.blocks.cells.tolist() == truth
        assert state.blocks.epoch == epoch
        assert len(state.log) <= MAX_LOG_LINES


def test_a_delta_before_any_snapshot_is_ignored() -> None:
    state = reduce(DashboardState(), Delta(epoch=1, runs=(BlockRun(0, 1, FREE),)))
    assert state.blocks is None


def test_earlier_states_are_left_alone() -> None:
    before = reduce(DashboardState(), snapshot([FREE] * 4))
    after = reduce(before, Delta(epoch=1, runs=(BlockRun(0, 2, CACHED),)))
    assert before.blocks is not None
    assert after.blocks is not None
    assert before.blocks.cells.tolist() == [FREE] * 4
    assert after.blocks.cells.tolist() == [CACHED, CACHED, FREE, FREE]


def test_events_that_contradict_the_map_are_refused() -> None:
    state = reduce(DashboardState(), snapshot([FREE] * 4))
    with pytest.raises(ValueError, match="map of 4 blocks"):
        reduce(state, Delta(epoch=1, runs=(BlockRun(3, 2, CACHED),)))


def test_stats_become_history() -> None:
    state = DashboardState()
    for rate in (1.0, 2.0, 3.0):
        state = reduce(state, msgspec.structs.replace(STATS, generation_tokens_per_second=rate))
    assert state.stats is not None
    assert state.stats.generation_tokens_per_second == 3.0
    assert state.history.generation_rate.values == (1.0, 2.0, 3.0)
    assert state.history.prompt_rate.values == (1234.5,) * 3
    assert state.history.inter_token.values == (0.0221,) * 3
    assert state.history.kv_usage.values == (0.25,) * 3


def test_running_sequences_come_first_and_old_ones_before_new_ones() -> None:
    shuffled = (
        sequence(0, "waiting", request_id="w1", age_seconds=3.0),
        sequence(2, age_seconds=1.0),
        sequence(0, "waiting", request_id="w2", age_seconds=90.0),
        sequence(1, age_seconds=20.0),
    )
    state = reduce(DashboardState(), Sequences(sequences=shuffled))
    assert [one.request_id for one in state.sequences] == ["chatcmpl-1", "chatcmpl-2", "w2", "w1"]


def test_the_map_is_current_only_with_a_connection_and_a_ready_engine() -> None:
    state = DashboardState()
    assert not state.current
    state = reduce(state, LIVE)
    assert state.current
    state = reduce(state, msgspec.structs.replace(INFO, state="restarting"))
    assert not state.current
    state = reduce(state, INFO)
    assert state.current
    assert not reduce(state, ConnectionChange(ConnectionPhase.LOST)).current


def test_ages_are_told_by_snapshots_and_counted_from_changes() -> None:
    first = Snapshot.of(1, 16, np.array([FREE] * 3, dtype="<u4").tobytes(), b"\x05\0\x07\0\0\0")
    state = reduce(DashboardState(), first, 100.0)
    state = reduce(state, Delta(epoch=1, runs=(BlockRun(1, 1, CACHED),)), 102.0)
    assert state.blocks is not None
    assert state.blocks.changed.tolist() == [95.0, 102.0, 100.0]
    # A snapshot without ages, as after a lost connection, keeps the ages of unchanged blocks.
    state = reduce(state, snapshot([FREE, FREE, FREE], epoch=2), 110.0)
    assert state.blocks is not None
    assert state.blocks.changed.tolist() == [95.0, 110.0, 100.0]


def test_tasks_are_kept_by_name_until_they_end_or_another_connection_begins() -> None:
    def job(name: str, done: int, *, ended: bool = False) -> Job:
        return Job(name=name, stage="s", done=done, total=9, ended=ended)

    def known(state: DashboardState) -> list[tuple[str, int]]:
        return [(one.name, one.done) for one in state.jobs]

    state = DashboardState()
    for one in (job("a", 1), job("b", 9), job("a", 2), job("c", 9, ended=True)):
        state = reduce(state, one)
    assert known(state) == [("a", 2), ("b", 9)]
    state = reduce(state, job("a", 2, ended=True))
    assert known(state) == [("b", 9)]
    state = reduce(state, ConnectionChange(ConnectionPhase.LOST))
    assert known(state) == [("b", 9)]
    assert known(reduce(state, LIVE)) == [], "what still goes on is told again"


def test_histories_of_differences() -> None:
    def stats(time: float, steps: int, queries: int, hits: int, *rows: int) -> Stats:
        engine = msgspec.structs.replace(
            STATS.engine, steps_total=steps, prefix_queries_total=queries, prefix_hits_total=hits
        )
        ran = tuple(StepView(at, prefill, 2, 3, 0.1) for at, prefill in enumerate(rows))
        return msgspec.structs.replace(STATS, time=time, engine=engine, steps=ran)

    state = DashboardState()
    for one in (stats(1.0, 100, 10, 5, 4, 8), stats(3.0, 140, 30, 20), stats(4.0, 3, 0, 0)):
        state = reduce(state, one)
    history = state.history
    assert history.steps.values == (0.0, 20.0, 0.0), "counters of a new engine begin at 0"
    assert history.hit_rate.values == (0.0, 0.75, 0.75)
    assert history.prefill_rows.values == (6.0, 0.0, 0.0)
    assert history.decode_rows.values == (2.0, 0.0, 0.0)
