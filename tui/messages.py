"""What widgets tell the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from appliance.tui.look import SequenceKey, Sort


@dataclass
class SequenceChosen(Message):
    """Somebody pointed at a sequence, or at what belongs to none."""

    key: SequenceKey | None


@dataclass
class BlockChosen(Message):
    """Somebody pointed at a block: the first one under the mouse."""

    block: int


@dataclass
class SortChosen(Message):
    """Somebody pointed at the heading of a column."""

    sort: Sort
