"""Every page as it looks, compared with what was approved: delete a file to approve it anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from appliance.events import Log, LogLine, Machine, QualityFact
from appliance.stats import StepView
from tests.tui.conftest import INFO, STATS, Answer, EventServer, page, sequence, sequences, snapshot
from tests.tui.piloting import CELLS, LARGE, SMALL, dashboard, screen_text, shown
from tests.tui.test_controls import TABLE

if TYPE_CHECKING:
    from appliance.tui.app import DashboardApp

APPROVED = Path(__file__).parent / "snapshots"
HUGE = (240, 67)
PAGES = {"1": "overview", "2": "map", "3": "requests", "4": "model", "5": "log", "?": "help"}
MACHINE = Machine(
    cpu_cores=16, cpu_used=5.5, engine_rss_bytes=3 * 2**30, api_rss_bytes=2**27,
    memory_total_bytes=64 * 2**30, memory_available_bytes=20 * 2**30,
)  # fmt: skip
ALL = Answer(
    (
        msgspec.structs.replace(
            INFO,
            memory_bytes=8 * 2**30,
            workspace_bytes=2**28,
            quality=(QualityFact(name="perplexity", value=11.53, note="WikiText"),),
        ),
        snapshot(CELLS),
        sequences(
            sequence(1, tokens_per_second=12.5, computed_tokens=1300),
            sequence(2, owner="codex", output_tokens=9),
            sequence(0, "waiting", request_id="cmpl-next", blocks=0, prompt_tokens=300),
        ),
        Log(lines=(LogLine(time=0.0, level="ERROR", source="engine", message="out of luck"),)),
        msgspec.structs.replace(
            STATS, machine=MACHINE, steps=(StepView(1, 384, 2, 3, 0.02), StepView(2, 0, 3, 3, 0.01))
        ),
    )
)


@pytest.mark.parametrize("size", [SMALL, LARGE, HUGE], ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("key", PAGES, ids=PAGES.get)
async def test_a_page_looks_as_approved(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch, key: str, size: tuple[int, int]
) -> None:
    monkeypatch.setattr("appliance.tui.widgets.log.time.localtime", lambda when: (0,) * 9)
    path = "/admin/v1/sequences/chatcmpl-1/0/blocks"
    event_server.pages[path] = page(msgspec.json.encode(TABLE))
    async with dashboard(event_server, size, ALL) as (app, pilot):
        await shown(app, pilot, lambda: app.state.stats)
        await pilot.press("question_mark" if key == "?" else key)
        if key == "2":
            await pilot.press("tab")
            await shown(app, pilot, lambda: app.state.table)
        await shown(app, pilot)
        await pilot.pause(0.1)
        look = text_of(app).replace(event_server.url, "http://127.0.0.1:8080".ljust(20))
    approved = APPROVED / f"{PAGES[key]}-{'x'.join(map(str, size))}.txt"
    if not approved.exists():
        approved.parent.mkdir(exist_ok=True)
        approved.write_text(look)
        pytest.fail(f"{approved.name} was not there: look at it, then run again")
    assert look == approved.read_text()


def text_of(app: DashboardApp) -> str:
    """The screen without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in screen_text(app).splitlines()) + "\n"
