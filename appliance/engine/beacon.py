"""Signs of life of an engine, in memory that others see whatever it is doing.

A step may take minutes on a slow machine, and a process that hangs looks the same from outside:
both report nothing. So what computes counts here how far it has come, and before a step begins to
work on requests it leaves their names: should the process die in it, they are known.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

WORDS = 512  # 64 bits each; one page
_PROGRESS, _WAITING, _COUNT, _NAMES = 0, 1, 2, 3
MAX_NAMES = WORDS - _NAMES


class Beacon:
    """One engine's signs.

    Args:
        words: (WORDS,) 64-bit words; None keeps them to this process.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        own = memoryview(array("Q", bytes(8 * WORDS)))
        self._words = own if words is None else words
        assert len(self._words) == WORDS

    def advance(self) -> None:
        """Something was computed."""
        self._words[_PROGRESS] = (self._words[_PROGRESS] + 1) % 2**63

    @property
    def progress(self) -> int:
        """How often anything was."""
        return self._words[_PROGRESS]

    @property
    def address(self) -> int:
        """Of the progress, for code that is not Python; valid as long as this object lives."""
        return ctypes.addressof(ctypes.c_uint64.from_buffer(self._words))

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """What a GPU does in the meantime shows nowhere."""
        self._words[_WAITING] = 1
        try:
            yield
        finally:
            self._words[_WAITING] = 0

    @property
    def waits_for_device(self) -> bool:
        """Whether it is waiting for one."""
        return bool(self._words[_WAITING])

    def start(self, request_ids: Iterable[str]) -> None:
        """The step that begins now is the first to work on these requests."""
        names = [name_of(request_id) for request_id in request_ids][:MAX_NAMES]
        self._words[_COUNT] = 0  # whoever reads in between sees none, or all
        for place, name in enumerate(names, _NAMES):
            self._words[place] = name
        self._words[_COUNT] = len(names)

    def started(self) -> set[int]:
        """Names of the requests that the latest `start` told of; see `name_of`."""
        count = min(self._words[_COUNT], MAX_NAMES)
        return set(self._words[_NAMES : _NAMES + count].tolist())


def name_of(request_id: str) -> int:
    """What a beacon calls a request."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
