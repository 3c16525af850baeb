"""Messages from widgets to the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from appliance.tui.look import SequenceKey, Sort


@dataclass
class SequenceChosen(Message):
    """The user clicked a sequence, or something that belongs to none."""

    key: SequenceKey | None


@dataclass
class BlockChosen(Message):
    """The user clicked a block: the first one under the mouse."""

    block: int


@dataclass
class SortChosen(Message):
    """The user clicked a column heading."""

    sort: Sort
