"""`run_dashboard` as a process of its own, on a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.tui.app import run_dashboard
from tests.tui.conftest import CACHED, INFO, STATS, Answer, EventServer, snapshot

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from appliance.tui.app import run_dashboard
code = run_dashboard(sys.argv[1], "key")
heavy = [n for n in sys.modules if n.split(".")[0] in ("torch", "transformers", "triton")]
ours = [n for n in sys.modules if n.startswith(("appliance.engine", "appliance.model"))]
print("loaded", heavy + ours)
sys.exit(code)
"""


async def until(words: bytes, drawn: bytearray) -> None:
    while words not in drawn:  # noqa: ASYNC110  (a terminal has no other way to tell)
        await asyncio.sleep(0.02)


async def test_it_draws_on_a_terminal_and_leaves_it_clean(event_server: EventServer) -> None:
    event_server.answers = [Answer((INFO, snapshot([CACHED] * 500), STATS))]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, event_server.url,
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    drawn = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: drawn.extend(os.read(ours, 65536)))
    try:
        async with asyncio.timeout(30):
            await until(b"SmolLM2", drawn)
            await until(b"cached 500", drawn)
            assert termios.tcgetattr(theirs) != before
            os.write(ours, b"q")
            assert await process.wait() == 0
            await until(b"loaded", drawn)
        assert termios.tcgetattr(theirs) == before
    finally:
        loop.remove_reader(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
        os.close(theirs)
    text = drawn.decode(errors="replace")
    assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l"), "the old screen is back"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "so is the cursor"
    assert "\x1b[?1000l" in text, "the mouse is let go"
    assert "loaded []" in text
    assert "authorization: bearer key" in event_server.requests[0].lower()


def test_without_a_terminal_it_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "http://127.0.0.1:1"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert result.returncode == 1
    assert "ConfigError: appliance top needs a terminal" in result.stderr


def test_a_bad_address_is_refused_before_the_screen_is_touched() -> None:
    with pytest.raises(ConfigError, match="is no address"):
        run_dashboard("ftp://box", None)
