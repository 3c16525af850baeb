"""The pages of requests, model and log, and the way back in time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from textual.events import Key

from appliance.events import Gpu, Job, Log, LogLine, Machine, QualityFact
from appliance.tui.app import DashboardApp
from appliance.tui.display import Colors, Display
from appliance.tui.look import Sort
from appliance.tui.palette import BACKGROUND, TEXT
from appliance.tui.recording import Recorder, ReplayFeed
from appliance.tui.scheme import SCHEMES
from appliance.tui.screens.page import Page
from appliance.tui.state import Connection, Phase
from appliance.tui.widgets.panel import LongPanel
from appliance.tui.widgets.requests import columns_for
from tests.tui.conftest import (
    CACHED,
    FREE,
    INFO,
    STATS,
    Answer,
    EventServer,
    page,
    sequence,
    sequences,
    snapshot,
)
from tests.tui.piloting import (
    CELLS,
    LARGE,
    SMALL,
    block_map_colors,
    dashboard,
    screen_strips,
    screen_text,
    shown,
    until,
)

THREE = sequences(
    sequence(1, owner="anna", output_tokens=5, tokens_per_second=9.0, age_seconds=50.0),
    sequence(2, owner="codex", output_tokens=900, tokens_per_second=40.0, age_seconds=40.0),
    sequence(3, owner="anna", output_tokens=70, tokens_per_second=2.0, age_seconds=30.0),
)
WITH_THREE = Answer((INFO, snapshot(CELLS), THREE, STATS))


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


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_a_request_is_aborted_after_a_question(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    path = "/admin/v1/requests/chatcmpl-1/abort"
    event_server.pages[path] = page(b'{"aborted": true}')
    async with dashboard(event_server, size) as (app, pilot):
        await pilot.press("x")
        await shown(app, pilot, lambda: "Choose a request first" in screen_text(app))
        await pilot.press("tab", "x")
        await shown(app, pilot)
        assert "Abort chatcmpl-1 of anna?" in screen_text(app)
        await pilot.press("n")
        await pilot.pause()
        assert not any(path in request for request in event_server.requests)
        await pilot.press("x", "y")
        await until(pilot, lambda: "Aborted chatcmpl-1" in screen_text(app))
        assert sum(path in request for request in event_server.requests) == 1


@pytest.mark.parametrize("theme", SCHEMES)
async def test_what_is_typed_can_be_read_in_every_theme(
    event_server: EventServer, theme: str
) -> None:
    display = Display(Colors.TRUECOLOR, theme=theme)
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


def told(app: DashboardApp) -> str:
    """The words of the newest message, however they are broken into lines."""
    toasts = list(app.screen.query("Toast"))
    area = toasts[-1].outer_size.region
    lines = (strip.text.strip(" ▌") for strip in toasts[-1].render_lines(area))
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize(
    ("request_id", "words"),
    [
        ("chatcmpl-1", ("Not yours: this request is of anna.", "APPLIANCE_API_KEY")),
        ("r" * 200, ("Not yours", "any.")),
    ],
)
async def test_why_a_request_cannot_be_aborted_comes_before_the_question(
    event_server: EventServer, size: tuple[int, int], request_id: str,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    theirs = sequences(sequence(1, request_id=request_id, yours=False))
    of_others = Answer((INFO, snapshot(CELLS), theirs, STATS))
    async with dashboard(event_server, size, of_others) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab", "x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert isinstance(app.screen, Page), "no question"
        for word in words:
            assert word in told(app)


async def test_a_request_that_has_ended_is_said_to_have_ended(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL, WITH_THREE) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab")
        event_server.send(sequences(sequence(2)))
        await shown(app, pilot, lambda: len(app.session.state.sequences) == 1)
        await pilot.press("x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert told(app).startswith("It has ended: there is nothing to abort of chatcmpl-1")
        await pilot.press("tab", "p")
        event_server.send(sequences())
        await until(pilot, lambda: not app.session.state.sequences)
        await pilot.press("x")
        await until(pilot, lambda: "It has ended since" in told(app))
        assert "chatcmpl-2" in told(app)
        await event_server.stop()
        await until(pilot, lambda: app.session.state.connection.phase is Phase.LOST)
        await pilot.press("x")
        await until(pilot, lambda: "No connection" in told(app))


async def test_in_a_recording_nothing_can_be_aborted(tmp_path: Path) -> None:
    path = tmp_path / "feed"
    recorder = Recorder(path, "box")
    for event in (Connection(Phase.LIVE), INFO, snapshot(CELLS), THREE, STATS):
        recorder.write(event)
    recorder.close()
    app = DashboardApp(ReplayFeed(path))
    async with app.run_test(notifications=True) as pilot:
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab", "x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert told(app) == "A recording: nothing can be aborted in it."


async def test_a_refused_abort_is_told(event_server: EventServer) -> None:
    path = "/admin/v1/requests/chatcmpl-1/abort"
    event_server.pages[path] = page(b'{"error": {"message": "it has ended"}}', "404 Not Found")
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab", "x", "y")
        await until(pilot, lambda: "Not aborted: it has ended" in screen_text(app))


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_the_model_and_its_memory(event_server: EventServer, size: tuple[int, int]) -> None:
    info = msgspec.structs.replace(
        INFO,
        memory_bytes=8 * 2**30,
        workspace_bytes=2**28,
        process_bytes=2**28,
        quality=(
            QualityFact(name="perplexity", value=11.53),
            QualityFact(name="kld_mean", value=0.0312, note="against Qwen3-8B"),
        ),
        notes=("the C library was not built",),
    )
    job = Job(
        name="quantize Qwen3-8B", stage="quantizing", done=3, total=36, seconds_left=75.0,
        part="layer 2", parts_done=4, parts_total=38, loss=0.01234,
    )  # fmt: skip
    unknown = Job(name="quantize tiny", stage="choosing", done=0, total=0)
    over = Job(name="quantize old", stage="s", done=1, total=2, ended=True)
    async with dashboard(event_server, size, Answer((info, STATS, job, unknown, over))) as (
        app,
        pilot,
    ):
        await pilot.press("4")
        await shown(app, pilot, lambda: len(app.session.state.jobs) == 2)
        text = screen_text(app)
        assert ("more ↓" in text) == (size == SMALL)
        await pilot.press("pagedown", "pagedown")
        await shown(app, pilot)
        text += screen_text(app)
        assert app.session.look.facts_down == max(one.hidden for one in app.screen.query(LongPanel))
        for words in (
            "perplexity",
            "11.53",
            "quality card  against Qwen3-8B",
            "KL divergence, mean",
            "0.0312",
            "Python and PyTorch",
            "quantize Qwen3-8B",
            "4 of 38",
            "loss 0.0123",
            "quantize tiny",
            "1:15 left",
            "8.3 %",
            "planned of",
            "3.0 GiB",
        ):
            assert words in text, words
        assert "note: the C library was not built" in text
        assert "quantize old" not in text
        await pilot.press(*["pageup"] * 3, "j", "k")
        assert app.session.look.facts_down == 0


async def test_a_gpu_is_shown_with_all_that_is_known(event_server: EventServer) -> None:
    gpu = Gpu(
        name="RTX 4090", utilization=0.93, memory_used_bytes=20 * 2**30,
        memory_total_bytes=24 * 2**30, power_watts=312.0, power_limit_watts=450.0,
        temperature_celsius=71.0, sm_clock_mhz=2520, throttled=("power cap",),
        joules_per_token=0.42,
    )  # fmt: skip
    laptop = Gpu(name="laptop", temperature_celsius=55.0)  # says nothing of power
    machine = Machine(gpus=(gpu, laptop, Gpu(name="silent")))
    stats = msgspec.structs.replace(STATS, machine=machine)
    async with dashboard(event_server, LARGE, Answer((INFO, stats))) as (app, pilot):
        await pilot.press("4")
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
    for words in (
        "RTX 4090",
        "93%",
        "20.0 GiB",
        "312 W  71 °C",
        "limit: power cap",
        "2,520 MHz",
        "0.42 J/token",
        "laptop",
        "55 °C",
        "silent",
    ):
        assert words in text, words


async def test_two_gpus_share_the_room_of_one(event_server: EventServer) -> None:
    gpus = tuple(
        Gpu(name=f"card {number}", utilization=number / 10, memory_used_bytes=number * 2**30,
            power_watts=100.0 * number, throttled=("power cap",) if number == 2 else ())
        for number in (1, 2)
    )  # fmt: skip
    stats = msgspec.structs.replace(STATS, machine=Machine(gpus=gpus))
    async with dashboard(event_server, LARGE, Answer((INFO, stats))) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
    for words in ("card 1", "10%", "1.0 GiB", "100 W", "card 2", "20%", "2.0 GiB", "200 W"):
        assert words in text, words
    assert "200 W  power cap" in text


async def test_without_a_gpu_processor_and_memory_are_shown(event_server: EventServer) -> None:
    machine = Machine(cpu_cores=16, cpu_used=5.5, engine_rss_bytes=3 * 2**30)
    stats = msgspec.structs.replace(STATS, machine=machine)
    async with dashboard(event_server, LARGE, Answer((INFO, stats))) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
    assert "of 16 cores" in text
    assert "5.5" in text
    assert "3.0 GiB" in text


def log_line(number: int, level: str = "WARNING") -> LogLine:
    return LogLine(time=float(number), level=level, source="engine", message=f"line {number}")


async def test_the_log_grows_and_is_scrolled(event_server: EventServer) -> None:
    many = Log(lines=tuple(log_line(number) for number in range(100)))
    async with dashboard(event_server, SMALL, Answer((INFO, many))) as (app, pilot):
        await pilot.press("5")
        await shown(app, pilot, lambda: app.session.state.log)
        assert "line 99" in screen_text(app)
        assert "line 50" not in screen_text(app)
        event_server.send(Log(lines=(log_line(100, "ERROR"),)))
        await shown(app, pilot, lambda: len(app.session.state.log) == 101)
        assert "ERROR    engine: line 100" in screen_text(app)
        await pilot.press(*["pageup"] * 5)
        await shown(app, pilot)
        assert "line 50" in screen_text(app)
        assert "line 100" not in screen_text(app)
        await pilot.press(*["pageup"] * 50)
        await shown(app, pilot)
        assert "line 0" in screen_text(app)


async def test_an_empty_log_says_so(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("5")
        await shown(app, pilot)
        assert "Nothing to tell" in screen_text(app)


async def test_back_in_time_and_forward_again(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        before = block_map_colors(app)
        await pilot.pause(0.3)
        event_server.send(snapshot([CACHED] * 4096))
        await shown(
            app,
            pilot,
            lambda: app.session.state.blocks and app.session.state.blocks.counts().active == 0,
        )
        assert block_map_colors(app) != before
        app.session.rewind(0.2)
        await shown(app, pilot)
        assert "paused" in screen_text(app)
        assert block_map_colors(app) == before
        await pilot.press("right_square_bracket")
        await shown(app, pilot)
        assert app.session.look.held is None
        assert "live" in screen_text(app)
        await pilot.press("left_curly_bracket")  # farther than there is: the beginning
        assert app.session.look.held is not None


async def test_pages_are_in_the_command_palette(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Page: requests", "Colours: age", "Theme: light", "Abort request"} <= titles
        await pilot.press("ctrl+p")
        await pilot.pause(0.2)
        await pilot.press(*"page: log")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await shown(app, pilot, lambda: app.current_mode == "log")


async def test_another_make_of_server_is_shown_by_its_metrics(event_server: EventServer) -> None:
    text = 'vllm:num_requests_running{model_name="Qwen/Qwen3-8B"} 3\n'
    text += 'vllm:kv_cache_usage_perc{model_name="Qwen/Qwen3-8B"} 0.25\n'
    event_server.pages["/metrics"] = page(text.encode(), kind="text/plain; version=0.0.4")
    missing = page(b"{}", "404 Not Found")
    async with dashboard(event_server, LARGE, missing) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
        for words in (
            "Qwen/Qwen3-8B", "its metrics only", "runs on another make of server", "25.0 %",
            "does not tell its requests", "● live",
        ):  # fmt: skip
            assert words in text, words
        del event_server.pages["/metrics"]
        await shown(app, pilot, lambda: not app.session.state.current)
        assert "is not an appliance" in screen_text(app) or "lost" in screen_text(app)


@pytest.mark.parametrize("width", [30, 60, 76, 100, 120, 200])
def test_columns_of_the_table_fit_and_the_id_stays(width: int) -> None:
    columns = columns_for(width)
    assert columns[0].sort is Sort.REQUEST
    assert 4 + sum(column.width for column in columns) <= max(width, 44)
    assert (len(columns) == len(Sort)) is (width >= 92)


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
