"""The dashboard in tmux, which paints like a terminal, in two colour depths."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tui.conftest import EventServer
from tests.tui.piloting import EVERYTHING

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def tmux(*arguments: str) -> str:
    socket = f"appliance-test-{os.getpid()}"
    result = subprocess.run(
        ["tmux", "-L", socket, "-f", "/dev/null", *arguments],
        capture_output=True, text=True, check=False, timeout=30,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    return result.stdout


@pytest.mark.parametrize(
    ("colors", "wanted", "never"),
    [
        ("truecolor", "38;2;86;180;233", "\x1b[96m"),  # the first owner's hue
        ("16", "96", "38;2;"),
    ],
)
async def test_a_terminal_shows_the_map_in_its_colours(
    event_server: EventServer, colors: str, wanted: str, never: str
) -> None:
    event_server.answers = [EVERYTHING]
    program = [sys.executable, "-m", "appliance", "top", "--url", event_server.url]
    command = shlex.join(
        ["env", f"PYTHONPATH={ROOT}", "TERM=xterm-256color", *program, "--colors", colors]
    )
    tmux("new-session", "-d", "-x", "160", "-y", "48", "-s", "top", command)
    tmux("set-option", "-sa", "terminal-overrides", ",*:Tc")
    try:
        async with asyncio.timeout(60):
            while "chatcmpl-2" not in (plain := tmux("capture-pane", "-p", "-t", "top")):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        painted = tmux("capture-pane", "-p", "-e", "-t", "top")
        tmux("send-keys", "-t", "top", "q")
    finally:
        tmux("kill-server")
    assert "KV blocks by owner" in plain
    assert "free 2,048" in plain
    assert "▀" in plain or " " * 50 in plain
    assert wanted in painted
    assert never not in painted
