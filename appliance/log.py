"""Logging, configured once by the command line; all else only calls `getLogger(__name__)`."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: int = logging.INFO) -> None:
    """Send the project's log lines to stderr, one record a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter(FORMAT))
    root = logging.getLogger("appliance")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


class _OneLineFormatter(logging.Formatter):
    """Keeps a record on one line of the log, so that no message can forge another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)
