"""`appliance docs` in a terminal, with common pagers."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from support.runs.waiting import LIMIT

SIZE = struct.pack("HHHH", 20, 80, 0, 0)  # rows, columns
# Sequences that move the cursor, clear, or set a colour: a terminal shows none of them.
OBEYED = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\([AB])|[\x07\x08\r]")


def shown(topic: str, environment: dict[str, str], until: str) -> str:
    """The text that the terminal shows, up to a word; then q is pressed and the pager ends."""
    usual = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    usual |= {"HOME": os.environ["HOME"], "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "appliance", "docs", topic]
        os.execve(sys.executable, command, usual | environment)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, SIZE)
        found, end = b"", time.monotonic() + LIMIT
        quitting = False
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    new = os.read(terminal, 65536)
                except OSError:  # the other side has closed
                    break
                if not new:
                    break
                found += new
            elif not quitting and until in OBEYED.sub("", found.decode(errors="replace")):
                quitting = True
                os.write(terminal, b"q")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, found
    finally:
        os.close(terminal)
    return found.decode()


def pagers() -> list[tuple[dict[str, str], bool]]:
    """Environments, and whether the pager shows styles."""
    found: list[tuple[dict[str, str], bool]] = [
        ({"PAGER": "cat"}, True),
        ({"PAGER": ""}, True),
        ({"PAGER": "cat -u"}, False),
        ({"TERM": "dumb"}, False),
        ({"PAGER": "/nowhere/pager"}, False),
    ]
    if shutil.which("less"):
        found += [
            ({}, True),
            ({"LESS": ""}, True),
            ({"LESS": "-S"}, True),
            ({"PAGER": "less -i"}, True),
            ({"PAGER": "less | less"}, False),
            ({"NO_COLOR": "1"}, True),
        ]
    if shutil.which("more"):
        found.append(({"PAGER": "more"}, False))
    return found


@pytest.mark.parametrize(("environment", "styled"), pagers(), ids=str)
def test_a_page_is_readable(environment: dict[str, str], styled: bool) -> None:
    raw = shown("clients", environment, "appliance chat")
    text = OBEYED.sub("", raw)
    assert "Clients" in text
    assert "appliance chat" in text
    assert "\x1b" not in text, "of all sequences"
    assert not re.search(r"ESC\[|\^\[\[|\[[0-9;]+m", text), "nor as less and cat -v spell them"
    assert ("\x1b[1" in raw) is styled
    if "NO_COLOR" in environment:
        assert not re.search(r"\x1b\[[0-9;]*(38|48);", raw)


def test_a_pipe_gets_the_page_as_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "appliance", "docs", "clients"],
            {**os.environ, "FORCE_COLOR": "1", "PAGER": "false"},
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = (tmp_path / "out").read_text()
    assert text.startswith("# Clients")
    assert "\x1b" not in text
