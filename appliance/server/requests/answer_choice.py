"""Turns the deltas of one choice into final pieces of text. Knows no wire format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.dialects import CallArguments, CallBegin
from appliance.engine.nouns.request import FinishReason
from appliance.server.requests.pieces import Piece
from appliance.text.best_of import Likelihood

if TYPE_CHECKING:
    from collections.abc import Collection

    from appliance.dialects import Part, Reader
    from appliance.engine.nouns.messages import SequenceDelta, TokenLogprobs
    from appliance.text.output import ChoiceText


class AnswerChoice:
    """One choice of an answer, from its first delta to its end.

    Args:
        number: its place among all choices of the API request.
        reader: splits the text into parts; None keeps it whole.
        ends: tokens that end a choice, which are reported without log probabilities.
    """

    def __init__(
        self, number: int, text: ChoiceText, reader: Reader | None, ends: Collection[int]
    ) -> None:
        self._number = number
        self._text = text
        self._reader = reader
        self._ends = ends
        self._held: list[TokenLogprobs] = []  # of text that is not final
        self._arguments: list[str] = []  # of the call that the text ends with
        self.likelihood = Likelihood()
        self.ended = False
        self.reasoning_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def push(self, delta: SequenceDelta, completion_tokens: int) -> Piece | None:
        """Return the piece that a delta completes, if it does.

        `completion_tokens` counts those of all choices, the delta's included.
        """
        text, reason = self._text.push(delta.token_ids, delta.finish_reason)
        parts: tuple[Part, ...] | None = None
        if self._reader is not None:
            parts, reason = self._read(self._reader, text, len(delta.token_ids), reason)
            text = ""
        self.likelihood.add(delta)
        if delta.logprobs is not None:
            self._held += self._shown(delta, delta.logprobs)
        if reason is not None:
            self.ended = True
        elif not (parts or text):
            return None
        tokens: tuple[TokenLogprobs, ...] = ()
        if self._held:
            tokens, self._held = tuple(self._held), []
        stopped_by = "" if reason is None else self._text.stopped_by
        return Piece(
            self._number,
            text,
            tokens,
            reason,
            parts,
            stopped_by,
            completion_tokens,
            cuts_call=reason is FinishReason.STOP and self._is_calling(),
        )

    def _read(
        self, reader: Reader, text: str, num_tokens: int, reason: FinishReason | None
    ) -> tuple[tuple[Part, ...], FinishReason | None]:
        """Return a text's parts and the finish reason: STOP if nothing may follow."""
        thought = reader.thinking
        parts = reader.push(text)
        if thought or reader.thinking:
            self.reasoning_tokens += num_tokens
        # Before the reader finishes, which ends half a call too.
        if reader.ended:
            reason = FinishReason.STOP
        elif reason is not None:
            parts += reader.finish(cut=reason is not FinishReason.STOP)
        for part in parts:
            if isinstance(part, CallArguments):
                self._arguments.append(part.text)
            else:
                self._arguments = [""] if isinstance(part, CallBegin) else []
        return tuple(parts), reason

    def _is_calling(self) -> bool:
        """Return True if the text ends inside a call's arguments."""
        if not self._arguments:
            return False
        try:
            msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            return True
        return False

    def _shown(
        self, delta: SequenceDelta, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Return a delta's log probabilities, without an end token's."""
        if (
            delta.finish_reason is FinishReason.STOP
            and delta.token_ids
            and delta.token_ids[-1] in self._ends
        ):
            return logprobs[:-1]
        return logprobs
