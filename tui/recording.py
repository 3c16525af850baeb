"""A feed on disk: what `--record` writes and `--replay` plays.

The first line tells what the file is; each further one is one item of the feed as JSON, with the
seconds since the beginning.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ConfigError
from appliance.events import EVENTS, NAMES, BlockTable
from appliance.tui.state import Connection, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.tui.state import FeedItem

FORMAT = 1
_FLUSH_SECONDS = 1.0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a recording."""

    appliance_recording: int  # `FORMAT`
    source: str  # the server
    time: float  # Unix seconds


class _ConnectionLine(msgspec.Struct, frozen=True):
    phase: str
    reason: str = ""


class Line(msgspec.Struct, frozen=True):
    """Any other line."""

    t: float  # seconds since the beginning
    name: str
    data: msgspec.Raw


_line_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def encode_item(item: FeedItem, at: float) -> bytes:
    """One line, without its end."""
    match item:
        case Connection():
            name, data = (
                "connection",
                _encoder.encode(_ConnectionLine(item.phase.name, item.reason)),
            )
        case BlockTable():
            name, data = "table", _encoder.encode(item)
        case _:
            name, data = NAMES[type(item)], _encoder.encode(item)
    return b'{"t":%.3f,"name":"%s","data":%s}' % (at, name.encode("ascii"), data)


def decode_item(line: bytes) -> tuple[float, FeedItem | None]:
    """When it was, and what: None for a kind that this version does not know.

    Raises:
        msgspec.MsgspecError: it is no line of a recording.
    """
    decoded = _line_decoder.decode(line)
    match decoded.name:
        case "connection":
            told = msgspec.json.decode(decoded.data, type=_ConnectionLine)
            phase = Phase.__members__.get(told.phase, Phase.LOST)
            return decoded.t, Connection(phase, told.reason)
        case "table":
            return decoded.t, msgspec.json.decode(decoded.data, type=BlockTable)
        case name:
            kind = EVENTS.get(name)
            item = None if kind is None else msgspec.json.decode(decoded.data, type=kind)
            return decoded.t, item


class Recorder:
    """Writes a recording.

    Args:
        path: a new file; none is overwritten.
        source: the server that is watched.

    Attributes:
        failure: why nothing more is written, in words; empty while all is well.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._begin = time.monotonic()
        self._next_flush = self._begin
        self.failure = ""
        try:
            # Requests stand in it: it is for its owner only.
            self._file = open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")  # noqa: SIM115
        except FileExistsError as error:
            raise ConfigError(f"--record {path}: the file exists; name a new one") from error
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from error
        header = Header(appliance_recording=FORMAT, source=source, time=time.time())
        self._file.write(_encoder.encode(header) + b"\n")

    def write(self, item: FeedItem) -> None:
        """Add an item; once a write failed, nothing more is added."""
        if self.failure:
            return
        now = time.monotonic()
        try:
            self._file.write(encode_item(item, now - self._begin) + b"\n")
            if now >= self._next_flush:
                self._file.flush()
                self._next_flush = now + _FLUSH_SECONDS
        except OSError as error:
            self.failure = f"recording stopped: {error.strerror}"

    def close(self) -> None:
        """Write what is still held back."""
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or f"recording stopped: {error.strerror}"


class ReplayFeed:
    """Plays a recording as if its server were there.

    Args:
        path: the file.
        speed: times faster than it was; infinite waits for nothing.

    Raises:
        ConfigError: it cannot be read, or is no recording.
    """

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.readline(), type=Header)
        except OSError as error:
            raise ConfigError(f"--replay {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--replay {path}: not a recording of appliance top") from error
        if header.appliance_recording > FORMAT:
            raise ConfigError(f"--replay {path}: made by a newer version of appliance top")
        self.name = f"{path.name} of {header.source}"
        self._path, self._speed = path, speed

    async def follow(self, publish: Callable[[FeedItem], None]) -> None:
        """Publish all items at their time, then the end."""
        begin = time.monotonic()
        reason = "the recording is over"
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    continue
                try:
                    at, item = decode_item(line)
                    if item is None:
                        continue
                    await asyncio.sleep(max(0.0, begin + at / self._speed - time.monotonic()))
                    publish(item)
                except (msgspec.MsgspecError, ValueError) as error:
                    # What was being written when a recording was cut short.
                    reason = f"line {number} of the recording cannot be read: {error}"
                    break
        publish(Connection(Phase.ENDED, reason))
