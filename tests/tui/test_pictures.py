"""Pictures of prompts: requests that wait for them, their rows, and what encoding took."""

from __future__ import annotations

import msgspec

from appliance.events import decode_event
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, sequence, sequences, snapshot
from tests.tui.piloting import LARGE, dashboard, screen_text, shown

READS_PICTURES = msgspec.structs.replace(INFO, reads_pictures=True)
ENCODED = msgspec.structs.replace(
    STATS,
    engine=msgspec.structs.replace(
        STATS.engine,
        pictures_encoded_total=12,
        picture_hits_total=4,
        picture_seconds_total=3.0,
        picture_bytes=3 * 2**20,
    ),
)
WAITS = sequence(
    0, "encoding", request_id="cat", blocks=0, prompt_tokens=300, picture_rows=256, cached_tokens=0
)


async def test_a_request_waits_for_its_pictures(event_server: EventServer) -> None:
    events = (READS_PICTURES, snapshot([FREE] * 64), sequences(sequence(1), WAITS), ENCODED)
    async with dashboard(event_server, LARGE, Answer(events)) as (app, pilot):
        await pilot.press("3", "slash", *"encoding", "enter", "tab")
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        for page in ("3", "2"):
            await pilot.press(page)
            await shown(app, pilot)
            facts = " ".join(screen_text(app).replace("│", " ").split())
            assert "of these, of pictures rows 256" in facts
            assert "waits for its pictures to be encoded" in facts
        await pilot.press("3", "escape", "escape", "slash", *"running", "enter", "tab")
        await shown(app, pilot)
        assert "of pictures" not in screen_text(app), "a text alone"


async def test_the_memory_page_tells_what_encoding_took(event_server: EventServer) -> None:
    for info in (READS_PICTURES, INFO):
        answer = Answer((info, snapshot([FREE] * 64), ENCODED))
        async with dashboard(event_server, LARGE, answer) as (app, pilot):
            await pilot.press("4")
            await shown(app, pilot, lambda: app.session.state.stats)
            await shown(app, pilot)
            text = " ".join(screen_text(app).replace("│", " ").split())
        words = ("encoded 250 ms each 12", "met again 25.0 % 4", "rows kept 3.0 MiB")
        assert [one in text for one in words] == [info.reads_pictures] * 3


def test_the_feed_of_an_older_server_is_read() -> None:
    view = msgspec.to_builtins(sequence(1))
    del view["picture_rows"]
    data = msgspec.json.encode({"sequences": [view]})
    assert decode_event("sequences", data) == sequences(sequence(1))
