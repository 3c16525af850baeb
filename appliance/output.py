"""Converts token ids to text, one choice at a time: detokenizer and stop strings together.

The server and offline use share it, so that both end an answer at the same character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.request import FinishReason
from appliance.tokenizer import DecodeStream, StopStringMatcher

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer


class ChoiceText:
    """The growing text of one choice.

    Args:
        stop: strings that end it.
        shown: control tokens to emit as text, for later parsers.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], shown: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = DecodeStream(tokenizer, shown)
        self._matcher = StopStringMatcher(stop)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the text; empty if none did."""
        return self._matcher.matched

    def push(
        self, token_ids: tuple[int, ...], finish_reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Add tokens; return the text that is now certain, and the finish reason or None.

        Text that may begin a stop string is held back until it is decided.
        """
        text, matched = self._matcher.push(self._decoder.push(token_ids))
        if not matched and finish_reason is not None:
            rest, matched = self._matcher.push(self._decoder.flush())
            text += rest
            if not matched:
                text += self._matcher.flush()
        return text, FinishReason.STOP if matched else finish_reason
