"""Blocks on their way: within the cache, out of it to host memory, and back into it.

Plain frozen data. Imports no torch and knows neither tensors nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block of every layer, and with sealed layers its open page."""

    source: int
    destination: int
    open_source: int = -1
    open_destination: int = -1


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Take the content of one block of every layer out of the cache.

    Attributes:
        block: in the cache.
        open_page: that goes with it, where it is not full and layers are sealed.
    """

    block: int
    open_page: int = -1


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Put content into one block of every layer.

    Attributes:
        block: in the cache.
        source: what to put there, or its place among what the same plan saves.
        open_page: that goes with it, where it is not full and layers are sealed.
    """

    block: int
    source: SavedBlock | int
    open_page: int = -1

    def content(self, saved: Sequence[SavedBlock]) -> SavedBlock:
        """What to put there, given what the plan has saved."""
        return saved[self.source] if isinstance(self.source, int) else self.source


class Awaitable(Protocol):
    """Something on a device that is over at some time."""

    def wait(self) -> None:
        """Block until then, as often as anybody asks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """The content of a block in host memory.

    Attributes:
        content: the bytes.
        over: when they are all there, if the device brings them by itself.
    """

    content: bytes | bytearray | memoryview
    over: Awaitable | None = None

    def read(self) -> bytes | bytearray | memoryview:
        """The bytes, once they are all there."""
        if self.over is not None:
            self.over.wait()
        return self.content
