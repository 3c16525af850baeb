"""Messages from widgets to the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from appliance.tui.look import SequenceKey, Sort


@dataclass
class SequenceChosen(Message):
    """The user clicked a sequence; `key` is None for a click on something without one."""

    key: SequenceKey | None


@dataclass
class BlockChosen(Message):
    """The user clicked a cell; `block` is the first block in it."""

    block: int


@dataclass
class SortChosen(Message):
    """The user clicked a column heading."""

    sort: Sort
