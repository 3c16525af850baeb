"""Decodes server-sent events from a byte stream in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_FRAME_BYTES = 64 * 1024 * 1024  # a snapshot of ten million blocks is smaller


@dataclass(slots=True)
class EventDecoder:
    """Collects bytes until frames are complete.

    It reads only `event` and `data` fields.
    """

    _rest: bytes = b""
    _name: str = ""
    _data: list[bytes] = field(default_factory=list)
    _size: int = 0

    @property
    def in_frame(self) -> bool:
        """True if the bytes so far end inside a frame."""
        return bool(self._rest or self._name or self._data)

    def feed(self, received: bytes) -> list[tuple[str, bytes]]:
        """Add bytes; return (event name, data) of each frame they complete.

        Raises:
            ValueError: a frame is larger than `MAX_FRAME_BYTES`.
        """
        self._size += len(received)
        *lines, self._rest = (self._rest + received).split(b"\n")
        frames = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                self._take(line)
                continue
            if self._data:
                frames.append((self._name or "message", b"\n".join(self._data)))
            self._name, self._data, self._size = "", [], len(self._rest)
        if self._size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of the feed is larger than {MAX_FRAME_BYTES} bytes")
        return frames

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._name = value.decode("utf-8", errors="replace")
        elif name == b"data":
            self._data.append(value)
