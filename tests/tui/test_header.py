"""The top line of a server of several models."""

from __future__ import annotations

import msgspec

from appliance.events import ModelView
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, snapshot
from tests.tui.piloting import LARGE, dashboard, screen_text, shown


async def test_the_header_names_the_models_in_memory(event_server: EventServer) -> None:
    models = (
        ModelView(name="a", state="ready"), ModelView(name="b", state="ready"),
        ModelView(name="c", state="asleep"),
    )  # fmt: skip
    info = msgspec.structs.replace(INFO, models=models)
    answer = Answer((info, snapshot([FREE] * 64), STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        assert "· 2 of 3 models in memory: a, b ·" in screen_text(app).splitlines()[0]
