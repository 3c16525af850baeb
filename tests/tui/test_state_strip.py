"""Slots and checkpoints of recurrent state appear below the map, for models that have them."""

from __future__ import annotations

import msgspec

from appliance.tui import palette
from appliance.tui.widgets.strips import StateStrip
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, snapshot
from tests.tui.piloting import LARGE, dashboard, screen_text, shown


async def test_the_strip_shows_slots_checkpoints_and_free_rows(event_server: EventServer) -> None:
    engine = msgspec.structs.replace(
        STATS.engine,
        state_slots=32,
        state_slots_used=8,
        state_checkpoints=68,
        state_checkpoints_cached=30,
    )
    stats = msgspec.structs.replace(STATS, engine=engine)
    answer = Answer((INFO, snapshot([FREE] * 64), stats))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        assert "8 of 32 slots used, 30 of 68 checkpoints cached" in screen_text(app)
        counts: dict[str, int] = {}
        for segment in app.screen.query_one(StateStrip).render_line(0):
            if segment.style and segment.style.bgcolor and not segment.text.strip():
                name = segment.style.bgcolor.name
                counts[name] = counts.get(name, 0) + segment.cell_length
        width = counts[palette.ACTIVE] + counts[palette.CACHED] + counts[palette.FREE]
        assert counts[palette.ACTIVE] == round(0.08 * width)
        assert counts[palette.CACHED] == round(0.3 * width)


async def test_models_without_recurrent_layers_have_no_such_line(event_server: EventServer) -> None:
    answer = Answer((INFO, snapshot([FREE] * 64), STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        assert not app.screen.query_one(StateStrip).display
