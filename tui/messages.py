"""What widgets tell the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from appliance.tui.view import SequenceKey


class SequenceChosen(Message):
    """Somebody pointed at a sequence, or at what belongs to none.

    Attributes:
        key: the sequence; None for no sequence.
    """

    def __init__(self, key: SequenceKey | None) -> None:
        super().__init__()
        self.key = key
