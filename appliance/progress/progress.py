"""Shows progress of downloads, loading and quantizing: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

LINE_INTERVAL = 5.0  # seconds between lines without a bar


class ProgressLine:
    """Draws `progress(stage, done, total)` on stderr and restores the terminal.

    Shows totals of a million and more as MiB: they count bytes.

    Args:
        say: receives lines, for a log; replaces the bar.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say or _write_line
        self._on_terminal = say is None and sys.stderr.isatty()
        self._stage = ""
        self._last_line = 0.0
        self._drawn = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage; a total of 0 means unknown."""
        now = time.monotonic()
        new_stage = stage != self._stage
        if self._on_terminal:
            if new_stage:
                self.close()
            sys.stderr.write(f"\r\x1b[2K  {self._describe(stage, done, total, bar=True)}")
            sys.stderr.flush()
            self._drawn = True
        elif new_stage or done >= total > 0 or now - self._last_line > LINE_INTERVAL:
            self._say(self._describe(stage, done, total, bar=False))
            self._last_line = now
        self._stage = stage

    def close(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._drawn = False

    @staticmethod
    def _describe(stage: str, done: int, total: int, *, bar: bool) -> str:
        if total <= 0:
            return stage
        share = min(1.0, done / total)
        amount = f"{done}/{total}"
        if total >= 10**6:
            amount = f"{done / 2**20:,.1f} of {total / 2**20:,.1f} MiB"
        drawing = f"[{'=' * int(30 * share):<30}] " if bar else ""
        return f"{stage:<24} {drawing}{share:4.0%}  {amount}"


def _write_line(line: str) -> None:
    sys.stderr.write(f"  {line}\n")
