"""`run_dashboard` as a process of its own, on a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from appliance.errors import ConfigError, ModelError
from appliance.tui.run import run_dashboard
from tests.tui.conftest import CACHED, INFO, STATS, Answer, EventServer, snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from appliance.tui.run import run_dashboard
if "crash" in sys.argv:
    from appliance.tui.screens.dashboard_screen import DashboardScreen
    def crash(self):
        private = "a prompt"
        raise RuntimeError("planted")
    DashboardScreen.action_next_mode = crash
code = run_dashboard(sys.argv[1], "key")
heavy = [n for n in sys.modules if n.split(".")[0] in ("torch", "transformers", "triton")]
ours = [n for n in sys.modules if n.startswith(("appliance.engine", "appliance.model"))]
print("loaded", heavy + ours)
sys.exit(code)
"""


class Terminal:
    """A pseudo-terminal with the dashboard in it."""

    def __init__(
        self,
        *arguments: str,
        program: tuple[str, ...] = ("-c", PROGRAM),
        size: tuple[int, int] = (80, 24),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        self._set_size(*size)
        self.settings = termios.tcgetattr(self.theirs)
        self.drawn = bytearray()
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
            | (environment or {}),
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        self._set_size(columns, rows)
        self.process.send_signal(signal.SIGWINCH)  # no process has it as its controlling terminal

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not happened():  # noqa: ASYNC110  (a terminal has no other way to tell)
                await asyncio.sleep(0.02)

    async def shows(self, words: bytes) -> None:
        await self.until(lambda: words in self.drawn)

    async def ends(self) -> int:
        await self.until(lambda: self.process.poll() is not None)
        await asyncio.sleep(0.05)  # for its last output
        return self.process.returncode

    def assert_clean(self) -> None:
        assert termios.tcgetattr(self.theirs) == self.settings
        text = self.drawn.decode(errors="replace")
        assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l"), "the old screen is back"
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "so is the cursor"
        assert "\x1b[?1000l" in text, "the mouse is let go"


@asynccontextmanager
async def drawing(shown: Terminal) -> AsyncIterator[Terminal]:
    """Read what is drawn, and end the program at the end."""
    loop = asyncio.get_running_loop()
    loop.add_reader(shown.ours, lambda: shown.drawn.extend(os.read(shown.ours, 65536)))
    try:
        yield shown
    finally:
        loop.remove_reader(shown.ours)
        shown.process.kill()
        shown.process.wait()
        os.close(shown.ours)
        os.close(shown.theirs)


@asynccontextmanager
async def terminal(server: EventServer, *arguments: str) -> AsyncIterator[Terminal]:
    """A terminal that shows the whole dashboard."""
    server.answers = [Answer((INFO, snapshot([CACHED] * 500), STATS))]
    async with drawing(Terminal(server.url, *arguments)) as shown:
        await shown.shows(b"SmolLM2")
        await shown.shows(b"cached 500")
        assert termios.tcgetattr(shown.theirs) != shown.settings
        yield shown


def top(*arguments: str, **options: Any) -> Terminal:
    """Run `appliance top` as a person types it."""
    return Terminal(*arguments, program=("-m", "appliance", "top"), **options)


async def test_it_loads_nothing_heavy_and_leaves_the_terminal_clean(
    event_server: EventServer,
) -> None:
    async with terminal(event_server) as shown:
        os.write(shown.ours, b"q")
        assert await shown.ends() == 0
        await shown.shows(b"loaded []")
        shown.assert_clean()
    assert "authorization: bearer key" in event_server.requests[0].lower()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_leaves_the_terminal_clean(
    event_server: EventServer, number: signal.Signals
) -> None:
    async with terminal(event_server) as shown:
        shown.process.send_signal(number)
        assert await shown.ends() == 128 + number
        shown.assert_clean()


async def test_a_crash_leaves_the_terminal_clean_and_says_why(event_server: EventServer) -> None:
    async with terminal(event_server, "crash") as shown:
        os.write(shown.ours, b"c")
        assert await shown.ends() == 1
        shown.assert_clean()
        said = shown.drawn.split(b"\x1b[?1049l")[1]
        assert b"planted" in said
        assert b"locals" not in said, "they may be private"
        assert b"a prompt" not in said
        assert b"Bearer" not in said


def test_without_a_terminal_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nowhere:
        monkeypatch.setattr(sys, "stdin", nowhere)
        with pytest.raises(ConfigError, match="appliance top needs a terminal"):
            run_dashboard("http://127.0.0.1:1", "key")


def test_a_bad_address_is_refused_before_the_screen_is_touched() -> None:
    with pytest.raises(ConfigError, match="is no address"):
        run_dashboard("ftp://box", None)


async def test_a_terminal_that_is_too_small_is_told_and_a_locale_without_utf8_gets_ascii(
    event_server: EventServer,
) -> None:
    event_server.answers = [Answer((INFO, snapshot([CACHED] * 500), STATS))]
    small = top("--url", event_server.url, size=(20, 5), environment={"LC_ALL": "C"})
    async with drawing(small) as shown:
        await shown.shows(b"Terminal too small:")
        await shown.shows(b"20x5.")
        shown.resize(80, 24)
        await shown.shows(b"SmolLM2")
        await shown.shows(b":" * 60)
        os.write(shown.ours, b"q")
        assert await shown.ends() == 0
        shown.assert_clean()
    assert shown.drawn.isascii()


async def test_what_was_recorded_is_replayed(event_server: EventServer, tmp_path: Path) -> None:
    event_server.answers = [Answer((INFO, snapshot([CACHED] * 500), STATS))]
    path = str(tmp_path / "feed")
    async with drawing(top("--url", event_server.url, "--record", path)) as shown:
        await shown.shows(b"recording")
        await shown.shows(b"cached 500")
        os.write(shown.ours, b"q")
        assert await shown.ends() == 0
    await event_server.stop()
    async with drawing(top("--replay", path)) as shown:
        await shown.shows(b"cached 500")
        await shown.shows(b"end of the recording")
        os.write(shown.ours, b"q")
        assert await shown.ends() == 0
        shown.assert_clean()


async def test_a_server_that_fails_takes_its_dashboard_with_it() -> None:
    serve = ("-m", "appliance", "serve", "--port", "1", "/nowhere/model.gguf")
    async with drawing(Terminal(program=(*serve, "--top"))) as shown:
        assert await shown.ends() == ModelError.exit_code
        await shown.shows(b"the server ended; the last it said:")
        said = shown.drawn.split(b"the last it said:")[1]
        assert b"/nowhere/model.gguf" in said
        assert termios.tcgetattr(shown.theirs) == shown.settings
