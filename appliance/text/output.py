"""Converts token ids to text per choice: detokenizer and stop strings together.

The server and offline use share it, so both end an answer at the same character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.request import FinishReason
from appliance.tokenizer import DecodeStream, StopStringMatcher

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer


class ChoiceText:
    """The growing text of one choice.

    Args:
        shown: control tokens to emit as text, for parsers.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], shown: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = DecodeStream(tokenizer, shown)
        self._matcher = StopStringMatcher(stop)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._matcher.matched

    def push(
        self, token_ids: tuple[int, ...], finish_reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Add tokens; return the text that is final and the finish reason, if any.

        Holds back text that may begin a stop string.
        """
        text, matched = self._matcher.push(self._decoder.push(token_ids))
        if not matched and finish_reason is not None:
            rest, matched = self._matcher.push(self._decoder.flush())
            text += rest
            if not matched:
                text += self._matcher.flush()
        return text, FinishReason.STOP if matched else finish_reason
