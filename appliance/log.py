"""Configures logging once for the command line; other code only calls `getLogger(__name__)`."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

from appliance.stats import LogLine

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


MAX_RECENT = 200


class RecentWarnings(logging.Handler):
    """Keeps the latest warnings and errors for dashboards."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.total = 0  # all time, so that a reader can count the new ones
        self.lines: deque[LogLine] = deque(maxlen=MAX_RECENT)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(
            LogLine(
                time=record.created,
                level=record.levelname,
                source=record.name,
                message=record.getMessage(),
            )
        )

    def add(self, line: LogLine) -> None:
        """Add another process's line."""
        self.lines.append(line)
        self.total += 1

    def take(self) -> tuple[LogLine, ...]:
        """Return all lines and clear them."""
        lines = tuple(self.lines)
        self.lines.clear()
        return lines


class RepeatedWarningFilter(logging.Filter):
    """Passes a warning of each kind once per interval, and counts the suppressed ones.

    For loggers that outsiders can trigger: they would otherwise flood the log and push important
    warnings out of the recent ones. Errors always pass.

    Args:
        seconds: minimum between two of one kind.
    """

    _MAX_KINDS = 64

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[object, tuple[float, int]] = {}  # time of the last one, suppressed since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now = self._clock()
        when, held = self._kinds.pop(record.msg, (-math.inf, 0))
        if now - when < self._seconds:
            self._kinds[record.msg] = (when, held + 1)
            return False
        if len(self._kinds) >= self._MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[record.msg] = (now, 0)
        if held:
            record.msg, record.args = f"{record.getMessage()} ({held} more like it before)", ()
        return True


def configure(level: str = "info", form: str = "text") -> RecentWarnings:
    """Log to stderr, one record per line; return the recent warnings.

    Args:
        level: lowest level to log.
        form: text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _OneLineFormatter(FORMAT))
    root = logging.getLogger("appliance")
    recent = RecentWarnings()
    root.handlers[:] = [handler, recent]
    root.setLevel(level.upper())
    root.propagate = False
    return recent


def configured() -> tuple[str, str]:
    """Return level and format, to configure another process alike."""
    root = logging.getLogger("appliance")
    is_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in root.handlers)
    return logging.getLevelName(root.getEffectiveLevel()).lower(), "json" if is_json else "text"


class _OneLineFormatter(logging.Formatter):
    """Formats a record on one line, so that a message cannot forge another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)


class _JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with its `fields` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(),
            "level": record.levelname.lower(),
            "source": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
