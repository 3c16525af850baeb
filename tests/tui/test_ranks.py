"""The processes that divide a model, on the dashboard's model screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tests.server.metrics.test_ranks import RANKS
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, snapshot
from tests.tui.piloting import LARGE, dashboard, screen_text, shown

if TYPE_CHECKING:
    from appliance.events import Info


async def test_the_model_screen_shows_memory_share_balance_and_link(
    event_server: EventServer,
) -> None:
    info: Info = msgspec.structs.replace(INFO, ranks=RANKS)
    answer = Answer((info, snapshot([FREE] * 64), STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("4")
        await shown(app, pilot, lambda: "ranks" in screen_text(app))
        text = " ".join(screen_text(app).split())
    assert "0 share 2 1 thread 12.0 GB/s 72.0 MiB" in text
    assert "1 share 1 1 thread 6.0 GB/s 32.0 MiB" in text
    assert "through host memory 25.0 us 9.0 GB/s" in text
    assert "peer to peer changes data" in text
