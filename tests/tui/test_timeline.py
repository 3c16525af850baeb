"""Going back in time shows the state of that time, within bounded memory."""

from __future__ import annotations

import tracemalloc

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from appliance.events import BlockRun, Delta
from appliance.tui.session import SEGMENT_SECONDS, Timeline
from appliance.tui.state import ConnectionChange, ConnectionPhase, DashboardState, FeedItem, reduce
from tests.tui.conftest import CACHED, FREE, INFO, STATS, active, sequence, sequences, snapshot

NUM_BLOCKS = 64


def cells(state: DashboardState) -> list[int] | None:
    return None if state.blocks is None else state.blocks.cells.tolist()


items = st.one_of(
    st.builds(
        lambda start, cell: Delta(epoch=1, runs=(BlockRun(start, 2, cell),)),
        st.integers(0, NUM_BLOCKS - 2),
        st.sampled_from([FREE, CACHED, active(1)]),
    ),
    st.sampled_from(
        [INFO, STATS, sequences(sequence(1)), ConnectionChange(ConnectionPhase.LOST, "cut"),
         snapshot([CACHED] * NUM_BLOCKS)]
    ),
)  # fmt: skip


@given(st.lists(st.tuples(items, st.floats(0.001, 50.0)), max_size=40), st.data())
def test_any_moment_that_is_kept_looks_as_it_did(
    script: list[tuple[FeedItem, float]], data: st.DataObject
) -> None:
    timeline, state, now = Timeline(), DashboardState(), 0.0
    seen: list[tuple[float, DashboardState]] = []
    for item, pause in [(snapshot([FREE] * NUM_BLOCKS), 1.0), *script]:
        now += pause
        before, state = state, reduce(state, item, now)
        timeline.add(item, before, now)
        seen.append((now, state))
    when, then = data.draw(st.sampled_from(seen))
    found = timeline.state_at(when + 0.0005)
    assert found is not None
    assert cells(found) == cells(then)
    assert found.sequences == then.sequences
    assert found.connection.phase is then.connection.phase
    assert found.history == then.history
    assert timeline.state_at(0.0) is None


def test_an_hour_takes_no_more_memory_than_a_few_minutes() -> None:
    budget = 2_000_000
    timeline, state, sizes = Timeline(budget), DashboardState(), []
    busy = sequences(*(sequence(slot) for slot in range(1, 20)))
    ticks = 5 * 3600
    tracemalloc.start()
    for tick in range(ticks):
        now = tick / 5
        item: FeedItem
        if tick == 0:
            item = snapshot([FREE] * 4096)
        elif tick % 5 == 0:
            item = msgspec.structs.replace(STATS, time=now)
        elif tick % 50 == 1:
            item = busy
        else:
            item = Delta(epoch=1, runs=(BlockRun(tick % 4000, 9, active(tick % 9)),))
        before, state = state, reduce(state, item, now)
        timeline.add(item, before, now)
        if tick % (ticks // 6) == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert timeline.num_bytes < budget + 300_000
    assert timeline.begin is not None
    assert timeline.begin > 3600 - 60 * SEGMENT_SECONDS
    assert max(sizes[2:]) < 1.5 * min(sizes[2:]), sizes
