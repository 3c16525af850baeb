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
    def of_file(cls, descriptor: int, nbytes: int) -> Mapping:
        """Map a file whose pages are shared until they are written, and never written back.

        Raises:
            MemoryError: the system refuses.
        """
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            return cls._of(mmap.mmap(descriptor, nbytes, flags=flags))
        except (OSError, ValueError) as error:
            raise MemoryError(f"the system maps no {nbytes:,} bytes: {error}") from error

    @classmethod
    def _of(cls, memory: mmap.mmap) -> Mapping:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))


class Arena:
    """Pieces of memory that live as long as the arena.

    Args:
        mapping: memory that it begins with, all of it handed out.
        nbytes: of this memory, that count as handed out.
    """

    def __init__(self, mapping: Mapping | None = None, nbytes: int = 0) -> None:
        self.nbytes = nbytes  # handed out
        # Address, kind and number of the structs in it, whose addresses lead into it, too.
        self.structs: list[tuple[int, type[ctypes.Structure], int]] = []
        self._mappings: list[Mapping] = [] if mapping is None else [mapping]
        self._address = 0
        self._left = 0  # of the last mapping
        self._lefts: list[int] = []  # of those before it

    def mapped(self) -> list[tuple[int, int]]:
        """List address and bytes of all memory, handed out or not."""
        return [(one.address, len(one.memory)) for one in self._mappings]

    def handed_out(self) -> list[tuple[int, int]]:
        """List address and bytes of the memory of each mapping up to the last piece in it."""
        lefts = [*self._lefts, self._left]
        return [
            (address, nbytes - left)
            for (address, nbytes), left in zip(self.mapped(), lefts, strict=False)
        ]

    def claim(self, nbytes: int) -> int:
        """Return the address of some zeroed bytes.

        Raises:
            MemoryError: the system refuses.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._left:
            mapping = Mapping.of(max(CHUNK, size))
            if self._mappings:
                self._lefts.append(self._left)
            self._mappings.append(mapping)
            self._address, self._left = mapping.address, len(mapping.memory)
        address = self._address
        self._address += size
        self._left -= size
        self.nbytes += size
        return address
