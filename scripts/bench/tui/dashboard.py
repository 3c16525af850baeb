"""Measure bytes and CPU time of a frame of `appliance top`, over a pseudo-terminal.

The dashboard runs in a process in front of a synthetic feed that changes about 250 blocks a frame.
Time is that process's user and system time, so other load matters little.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import psutil

from appliance.bench.figures import spread
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import ROOT, conditions
from bench.tui.synthetic_feed import FeedServer, SyntheticEngine

WARM_UP = 4.0  # seconds: start, first full picture
COLORS = {
    "truecolor": {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    "256": {"TERM": "xterm-256color", "COLORTERM": ""},
    "16": {"TERM": "xterm", "COLORTERM": "", "TEXTUAL_COLOR_SYSTEM": "standard"},
}


class Terminal:
    """A pseudo-terminal that runs `appliance top` and counts what it draws."""

    def __init__(self, url: str, columns: int, rows: int, colors: str) -> None:
        self.drawn = 0
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "top", "--url", url],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **COLORS[colors]},
        )  # fmt: skip
        os.close(theirs)
        self.process = psutil.Process(self._process.pid)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        try:
            self.drawn += len(os.read(self._ours, 1 << 20))
        except OSError:  # it ended
            asyncio.get_running_loop().remove_reader(self._ours)

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._ours, keys.encode())

    def end(self) -> None:
        """Quit by the keyboard."""
        self.press("q")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)


async def measure(options: argparse.Namespace, columns: int, rows: int) -> dict[str, Any]:
    """Watch at one size; return figures per frame, one value per period."""
    engine = SyntheticEngine(options.blocks, options.sequences, options.changes)
    async with FeedServer(engine, options.fps) as server:
        terminal = Terminal(f"http://127.0.0.1:{server.port}", columns, rows, options.colors)
        try:
            await asyncio.sleep(WARM_UP)
            terminal.press(options.keys)
            await asyncio.sleep(1.0)
            kilobytes, milliseconds, shares = [], [], []
            changed = frames = 0
            for _ in range(options.periods):
                before = terminal.drawn, _cpu(terminal.process), server.ticks
                changed -= server.changed_blocks
                await asyncio.sleep(options.seconds)
                ticks = server.ticks - before[2]
                changed, frames = changed + server.changed_blocks, frames + ticks
                used = _cpu(terminal.process) - before[1]
                kilobytes.append((terminal.drawn - before[0]) / ticks / 1000)
                milliseconds.append(1000 * used / ticks)
                shares.append(100 * used / options.seconds)
            rss = terminal.process.memory_info().rss
        finally:
            terminal.end()
    return {
        "terminal": f"{columns}x{rows}",
        "kB_per_frame": spread(kilobytes, 2),
        "cpu_ms_per_frame": spread(milliseconds, 2),
        "percent_of_a_core": spread(shares, 2),
        "changed_blocks_per_frame": round(changed / frames),
        "rss_mb": round(rss / 1e6),
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", action="append", help="COLUMNSxROWS [160x48]; may be repeated")
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--changes", type=int, default=250, help="blocks a frame")
    parser.add_argument("--fps", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each period")
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--colors", choices=COLORS, default="truecolor")
    parser.add_argument("--keys", default="", help="pressed before the measurement")
    options = parser.parse_args()
    result: dict[str, Any] = {"conditions": conditions()}
    result["settings"] = {
        name: value for name, value in vars(options).items() if name not in ("out", "size")
    }
    result["sizes"] = [
        asyncio.run(measure(options, *map(int, size.split("x"))))
        for size in options.size or ["160x48"]
    ]
    write_result(options.out, result)
