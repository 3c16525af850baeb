"""Reports an engine's progress in shared memory, readable even during a step.

From outside, a step of minutes on a slow machine looks like a hung process. So the engine counts
its progress here, and writes the names of the requests that a step starts: if the process dies in
that step, they are known.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

WORDS = 512  # of 64 bits; one page
_PROGRESS, _WAITING, _COUNT, _NAMES = 0, 1, 2, 3
MAX_NAMES = WORDS - _NAMES


class Beacon:
    """Progress counter and started requests of one engine.

    Args:
        words: (WORDS,) 64-bit words; None allocates private ones.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        own = memoryview(array("Q", bytes(8 * WORDS)))
        self._words = own if words is None else words
        assert len(self._words) == WORDS

    def advance(self) -> None:
        self._words[_PROGRESS] = (self._words[_PROGRESS] + 1) % 2**63

    @property
    def progress(self) -> int:
        """Progress count, modulo 2**63."""
        return self._words[_PROGRESS]

    @property
    def address(self) -> int:
        """Address of the counter, for C code; valid while this object lives."""
        return ctypes.addressof(ctypes.c_uint64.from_buffer(self._words))

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Mark a wait for a GPU, whose progress is invisible here."""
        self._words[_WAITING] = 1
        try:
            yield
        finally:
            self._words[_WAITING] = 0

    @property
    def waits_for_device(self) -> bool:
        return bool(self._words[_WAITING])

    def start(self, request_ids: Iterable[str]) -> None:
        """Write the names of the requests that the next step starts."""
        names = [name_of(request_id) for request_id in request_ids][:MAX_NAMES]
        self._words[_COUNT] = 0  # a concurrent reader sees either none or all of them
        for place, name in enumerate(names, _NAMES):
            self._words[place] = name
        self._words[_COUNT] = len(names)

    def started(self) -> set[int]:
        """Return the names that the last `start` wrote; see `name_of`."""
        count = min(self._words[_COUNT], MAX_NAMES)
        return set(self._words[_NAMES : _NAMES + count].tolist())


def name_of(request_id: str) -> int:
    """Hash a request id into its name in a beacon."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
