"""What widgets tell the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from appliance.tui.look import SequenceKey, Sort


class SequenceChosen(Message):
    """Somebody pointed at a sequence, or at what belongs to none.

    Attributes:
        key: the sequence; None for no sequence.
    """

    def __init__(self, key: SequenceKey | None) -> None:
        super().__init__()
        self.key = key


class BlockChosen(Message):
    """Somebody pointed at a block.

    Attributes:
        block: the first one under the mouse.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block


class SortChosen(Message):
    """Somebody pointed at the heading of a column.

    Attributes:
        sort: the order that stands for it.
    """

    def __init__(self, sort: Sort) -> None:
        super().__init__()
        self.sort = sort
