"""Several engine processes of a model on the dashboard: the one shown, and the key to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.events import ReplicaView
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, snapshot
from tests.tui.piloting import LARGE, SMALL, dashboard, screen_text, shown, until

if TYPE_CHECKING:
    from appliance.events import Stats

TWO = (
    ReplicaView(state="ready", requests_running=3, kv_usage=0.25, prefix_hit_rate=0.5),
    ReplicaView(state="restarting", restarts=2),
)


def answer(replica: int, *replicas: ReplicaView) -> Answer:
    stats: Stats = msgspec.structs.replace(STATS, replicas=replicas)
    info = msgspec.structs.replace(INFO, replica=replica)
    return Answer((info, snapshot([FREE] * 64), stats))


async def test_a_key_turns_to_the_next_replica_and_back(event_server: EventServer) -> None:
    answers = [answer(0, *TWO), answer(1, *TWO), answer(0, *TWO)]
    async with dashboard(event_server, LARGE, *answers) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        assert "· replica 0 · 1 of 2 ready ·" in screen_text(app).splitlines()[0]
        for replica in (1, 0):
            await pilot.press("e")
            await shown(app, pilot, lambda: f"replica {replica} " in screen_text(app))  # noqa: B023
            await shown(app, pilot, lambda: app.session.state.stats)
            assert f"· replica {replica} ·" in screen_text(app).splitlines()[0]
    feeds = [one.split(" ")[1] for one in event_server.requests if "/events" in one]
    assert [path.partition("?")[2] for path in feeds] == ["", "replica=1", ""]


async def test_the_model_screen_has_a_line_for_each(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, answer(0, *TWO)) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("4")
        await shown(app, pilot, lambda: "1 of 2 ready" in screen_text(app))
        text = " ".join(screen_text(app).split())
        assert "0, shown" in text
        assert "3 running KV 25.0 % hits 50.0 %" in text
        assert "restarts 2" in text


async def test_a_small_terminal_counts_them(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL, answer(0, *TWO)) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        assert "1/2 replicas" in screen_text(app)


async def test_with_one_process_the_key_says_so(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, answer(0)) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("e")
        await until(pilot, lambda: "one engine process" in screen_text(app))
        assert "replica 0" not in screen_text(app)
    assert sum("/events" in one for one in event_server.requests) == 1
