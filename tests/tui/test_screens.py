"""The screens of model, machine and log, and the way back in time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from appliance.events import Gpu, Job, Log, LogLine, Machine, QualityFact
from appliance.tui.widgets.panel import LongPanel
from tests.tui.conftest import (
    CACHED,
    INFO,
    STATS,
    Answer,
    EventServer,
    snapshot,
)
from tests.tui.piloting import (
    LARGE,
    SMALL,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
)


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
            "Python and libraries",
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
    laptop = Gpu(name="laptop", temperature_celsius=55.0)  # it does not report its power
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
        await pilot.press(*["pageup"] * 10)
        await shown(app, pilot)
        assert "line 0" in screen_text(app)


async def test_an_empty_log_says_so(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("5")
        await shown(app, pilot)
        assert "No warnings or errors so far." in screen_text(app)


async def test_back_in_time_and_forward_again(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dashboard(event_server) as (app, pilot):
        before = block_map_colors(app)
        then = time.monotonic()
        event_server.send(snapshot([CACHED] * 4096))
        await shown(
            app,
            pilot,
            lambda: app.session.state.blocks and app.session.state.blocks.counts().active == 0,
        )
        assert block_map_colors(app) != before
        clock = SimpleNamespace(monotonic=lambda: then + 3)
        monkeypatch.setattr("appliance.tui.session.time", clock)
        app.session.rewind(3)
        await shown(app, pilot)
        assert "paused" in screen_text(app)
        assert block_map_colors(app) == before
        await pilot.press("right_square_bracket")
        await shown(app, pilot)
        assert app.session.look.held is None
        assert "live" in screen_text(app)
        await pilot.press("left_curly_bracket")  # farther back than recorded: the beginning
        assert app.session.look.held is not None


async def test_screens_are_in_the_command_palette(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Screen: requests", "Colours: age", "Theme: light", "Abort request"} <= titles
        await pilot.press("ctrl+p")
        await pilot.pause(0.2)
        await pilot.press(*"screen: log")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await shown(app, pilot, lambda: app.current_mode == "log")
