"""The page of requests: its table sorted and filtered, and the detail of one."""

from __future__ import annotations

import msgspec
import pytest
from rich.cells import cell_len
from textual.events import Key

from appliance.tui.look import Sort
from appliance.tui.palette import BACKGROUND, TEXT
from appliance.tui.terminal import SCHEMES, Colors, DisplaySettings
from appliance.tui.widgets.requests import columns_for
from tests.tui.conftest import (
    FREE,
    INFO,
    STATS,
    Answer,
    EventServer,
    sequence,
    sequences,
    snapshot,
)
from tests.tui.piloting import (
    CELLS,
    LARGE,
    SMALL,
    WITH_THREE,
    dashboard,
    screen_strips,
    screen_text,
    shown,
    until,
)


def order(text: str) -> list[str]:
    """The requests of the table from the top."""
    words = (word for line in text.splitlines() for word in line[:50].split())
    return [word.removeprefix("chatcmpl-") for word in words if word.startswith("chatcmpl-")]


async def test_the_table_is_sorted_by_any_column(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, WITH_THREE) as (app, pilot):
        await pilot.press("3")
        await shown(app, pilot, lambda: app.session.state.stats)
        assert order(screen_text(app)) == ["1", "2", "3"]
        for sort, wanted in {
            Sort.GENERATED: ["2", "3", "1"],
            Sort.SPEED: ["2", "1", "3"],
            Sort.KEY: ["1", "3", "2"],
        }.items():
            while app.session.look.sort is not sort:
                await pilot.press("s")
            await shown(app, pilot)
            assert order(screen_text(app)) == wanted
        await pilot.press("r")
        await shown(app, pilot)
        assert order(screen_text(app))[0] == "2"
        # The heading of the column `prompt`, inside the border.
        await pilot.click("RequestTable", offset=(60, 1))
        assert app.session.look.sort is Sort.PROMPT
        await pilot.click("RequestTable", offset=(60, 1))
        assert app.session.look.ascending


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_a_filter_shows_and_filters_while_it_is_typed(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size, WITH_THREE) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("3", "slash", *"anna")
        await shown(app, pilot, lambda: app.session.look.query == "anna")
        last = screen_text(app).splitlines()[-2:]
        assert last[0].split()[0] == "anna"
        assert "enter Keep" in last[1]
        assert "esc Clear" in last[1]
        assert order(screen_text(app)) == ["1", "3"]
        await pilot.press(*" 3x")
        await shown(app, pilot, lambda: app.session.look.query == "anna 3x")
        assert "No request contains 'anna 3x'; esc shows all." in screen_text(app)
        await pilot.press("backspace", "enter")
        assert app.focused is None
        await shown(app, pilot)
        assert "anna 3" in screen_text(app).splitlines()[-2], "what is kept is seen"
        assert order(screen_text(app)) == ["3"]
        await pilot.press("escape")
        await shown(app, pilot)
        assert order(screen_text(app)) == ["1", "2", "3"]
        await pilot.press("slash", *"codex", "escape")
        assert app.focused is None
        await shown(app, pilot)
        assert "codex" not in screen_text(app).splitlines()[-2]
        assert order(screen_text(app)) == ["1", "2", "3"]


async def test_the_detail_of_a_request(event_server: EventServer) -> None:
    secret = sequences(sequence(1, prompt="Tell me a joke about blocks", computed_tokens=1300))
    answer = Answer((INFO, snapshot(CELLS), secret, STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await pilot.press("3", "down")
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("down")
        await shown(app, pilot)
        text = screen_text(app)
        assert "Tell me a joke about blocks" in text
        assert "99.1 %" in text, "1300 of 82 blocks of 16"


async def test_wide_letters_keep_the_columns(event_server: EventServer) -> None:
    wide = sequence(
        1, request_id="世界" * 20, owner="安娜" * 9, model="模型" * 30, prompt="你好。" * 40
    )
    answer = Answer((INFO, snapshot(CELLS), sequences(wide, sequence(2)), STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("3", "tab")
        await shown(app, pilot)
        lines = screen_strips(app)
        assert {line.cell_length for line in lines} == {LARGE[0]}
        text = screen_text(app)
        rows = [line for line in text.splitlines() if "running" in line and "■" in line]
        assert len({cell_len(row[: row.index("running")]) for row in rows}) == 1
        assert text.count("你") == 40, "wrapped, not cut"


async def test_prompts_that_are_not_shown_are_not_shown(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, WITH_THREE) as (app, pilot):
        await pilot.press("3")
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("down")
        await shown(app, pilot)
        assert "This server does not show prompts." in screen_text(app)
        event_server.send(msgspec.structs.replace(INFO, prompts_shown=True))
        await shown(
            app, pilot, lambda: app.session.state.info and app.session.state.info.prompts_shown
        )
        text = " ".join(screen_text(app).split())
        assert "This server does not show another" in text


@pytest.mark.parametrize("theme", SCHEMES)
async def test_what_is_typed_can_be_read_in_every_theme(
    event_server: EventServer, theme: str
) -> None:
    display = DisplaySettings(Colors.TRUECOLOR, theme=theme)
    async with dashboard(event_server, SMALL, WITH_THREE, display=display) as (app, pilot):
        await pilot.press("3", "slash", "a")
        await shown(app, pilot, lambda: app.session.look.query == "a")
        (typed,) = [segment for segment in screen_strips(app)[-2] if segment.text.strip() == "a"]
        assert typed.style is not None
        assert typed.style.color is not None
        assert typed.style.bgcolor is not None
        wanted = {color: SCHEMES[theme].get(color, color) for color in (TEXT, BACKGROUND)}
        assert typed.style.color.name == wanted[TEXT]
        assert typed.style.bgcolor.name == wanted[BACKGROUND]


async def test_keys_that_come_at_once_are_all_typed(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL, WITH_THREE) as (app, pilot):
        await pilot.press("3")
        await until(pilot, lambda: app.session.state.stats)
        for key in ("slash", *"codex"):
            app.post_message(Key(key, "/" if key == "slash" else key))
        await shown(app, pilot, lambda: app.session.look.query == "codex")
        assert order(screen_text(app)) == ["2"]


@pytest.mark.parametrize("width", [30, 60, 76, 100, 120, 200])
def test_columns_of_the_table_fit_and_the_id_stays(width: int) -> None:
    columns = columns_for(width)
    assert columns[0].sort is Sort.REQUEST
    assert 4 + sum(column.width for column in columns) <= max(width, 44)
    assert (len(columns) == len(Sort) - 1) is (width >= 92)
    adapted = columns_for(width, adapted=True)
    assert 4 + sum(column.width for column in adapted) <= max(width, 44)
    assert (Sort.ADAPTER in [column.sort for column in adapted]) is (width >= 60)


async def test_adapters_have_a_column_where_there_are_some(event_server: EventServer) -> None:
    several = [sequence(1), sequence(2, adapter="sql")]
    for shows, own in ((False, several[:1]), (True, several)):
        answer = Answer((INFO, snapshot([FREE] * 64), sequences(*own), STATS))
        async with dashboard(event_server, LARGE, answer) as (app, pilot):
            await shown(app, pilot, lambda: app.session.state.stats)
            text = screen_text(app)
            assert ("adapter" in text) is shows
            assert ("sql" in text) is shows


async def test_siblings_are_told_apart_however_long_their_id_is(event_server: EventServer) -> None:
    long = "cmpl-" + 24 * "0123456789"
    beams = [sequence(1 + n, index=n, request_id=long) for n in range(3)]
    answer = Answer((INFO, snapshot([FREE] * 64), sequences(*beams), STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        text = screen_text(app)
    assert "cmpl-0123456789012345… #1" in text
    assert "… #2" in text
