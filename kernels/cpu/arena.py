"""Memory that the library reads: 64-byte aligned, zeroed, in huge pages where available."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

ALIGNMENT = 64  # bytes, a cache line and an AVX-512 register
CHUNK = 64 << 20  # bytes mapped at a time; unwritten ones take no memory


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory that is zero until it is written."""

    memory: mmap.mmap
    address: int

    @classmethod
    def of(cls, nbytes: int) -> Mapping:
        """Map memory.

        Raises:
            MemoryError: the system refuses.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            memory = mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            raise MemoryError(f"the system gives no {nbytes:,} bytes: {error}") from error
        return cls._of(memory)

    @classmethod
    def shared(cls, descriptor: int, nbytes: int, offset: int = 0) -> Mapping:
        """Map a part of a file in memory, shared with other processes.

        Raises:
            MemoryError: the system refuses.
        """
        try:
            return cls._of(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, offset=offset))
        except (OSError, ValueError) as error:
            raise MemoryError(f"the system gives no {nbytes:,} shared bytes: {error}") from error

    @classmethod
    def _of(cls, memory: mmap.mmap) -> Mapping:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))


class Arena:
    """Pieces of memory that live as long as the arena."""

    def __init__(self) -> None:
        self.nbytes = 0  # handed out
        self._mappings: list[Mapping] = []
        self._address = 0
        self._left = 0

    def mapped(self) -> list[tuple[int, int]]:
        """List address and bytes of all memory, handed out or not."""
        return [(one.address, len(one.memory)) for one in self._mappings]

    def claim(self, nbytes: int) -> int:
        """Return the address of some zeroed bytes.

        Raises:
            MemoryError: the system refuses.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._left:
            mapping = Mapping.of(max(CHUNK, size))
            self._mappings.append(mapping)
            self._address, self._left = mapping.address, len(mapping.memory)
        address = self._address
        self._address += size
        self._left -= size
        self.nbytes += size
        return address
