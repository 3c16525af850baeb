"""Records a feed to a file (`--record`) and plays it back (`--replay`).

The first line describes the file. Each further line is one item of the feed as JSON, with the
seconds since the recording began.
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
from appliance.tui.state import ConnectionChange, ConnectionPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.tui.state import FeedItem

FORMAT = 1
_FLUSH_SECONDS = 1.0


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    appliance_recording: int  # `FORMAT`
    source: str  # the server
    time: float  # Unix seconds


class _ConnectionLine(msgspec.Struct, frozen=True):
    phase: str
    reason: str = ""


class RecordingLine(msgspec.Struct, frozen=True):
    t: float  # seconds since the beginning
    name: str
    data: msgspec.Raw


_line_decoder = msgspec.json.Decoder(RecordingLine)
_encoder = msgspec.json.Encoder()


def encode_item(item: FeedItem, at: float) -> bytes:
    """Encode one item as a line without its newline."""
    match item:
        case ConnectionChange():
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
    """Decode a line's time and item, None if unknown; raise MsgspecError for other lines."""
    decoded = _line_decoder.decode(line)
    match decoded.name:
        case "connection":
            told = msgspec.json.decode(decoded.data, type=_ConnectionLine)
            phase = ConnectionPhase.__members__.get(told.phase, ConnectionPhase.LOST)
            return decoded.t, ConnectionChange(phase, told.reason)
        case "table":
            return decoded.t, msgspec.json.decode(decoded.data, type=BlockTable)
        case name:
            kind = EVENTS.get(name)
            item = None if kind is None else msgspec.json.decode(decoded.data, type=kind)
            return decoded.t, item


class Recorder:
    """Writes a recording.

    Args:
        path: a new file; an existing one is not overwritten.

    Attributes:
        failure: why writing stopped; empty while it works.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._begin = time.monotonic()
        self._next_flush = self._begin
        self.failure = ""
        try:
            # It contains requests: only its owner may read it.
            self._file = open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")  # noqa: SIM115
        except FileExistsError as error:
            raise ConfigError(f"--record {path}: the file exists; name a new one") from error
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from error
        header = RecordingHeader(appliance_recording=FORMAT, source=source, time=time.time())
        self._file.write(_encoder.encode(header) + b"\n")

    def write(self, item: FeedItem) -> None:
        """Append an item; does nothing after a failure."""
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
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or f"recording stopped: {error.strerror}"


class ReplayFeed:
    """Plays a recording as if its server were running.

    Args:
        speed: factor on the original speed; infinity does not wait.

    Raises:
        ConfigError: the file cannot be read, or is no recording.
    """

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.readline(), type=RecordingHeader)
        except OSError as error:
            raise ConfigError(f"--replay {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--replay {path}: not a recording of appliance top") from error
        if header.appliance_recording > FORMAT:
            raise ConfigError(f"--replay {path}: made by a newer version of appliance top")
        self.name = f"{path.name} of {header.source}"
        self._path, self._speed = path, speed

    async def follow(self, publish: Callable[[FeedItem], None]) -> None:
        """Publish all items at their recorded times, then the end."""
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
                    # The recording was cut off within a line.
                    reason = f"line {number} of the recording cannot be read: {error}"
                    break
        publish(ConnectionChange(ConnectionPhase.ENDED, reason))
