"""Turns the deltas of a choice into final pieces of its text. Knows no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from appliance.dialects import CallArguments, CallBegin, Content, Part
from appliance.engine.nouns.messages import TokenLogprobs
from appliance.engine.nouns.request import FinishReason
from appliance.text import Likelihood

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from appliance.dialects import Reader
    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.text import ChoiceText


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A final piece of one choice: text or parts, their tokens, the end."""

    choice: int
    text: str
    tokens: tuple[TokenLogprobs, ...]  # empty unless requested
    finish_reason: FinishReason | None
    parts: tuple[Part, ...] | None = None  # replaces the text if a reader splits it
    stopped_by: str = ""  # the stop string, at the end
    completion_tokens: int = 0  # of all choices, up to this piece
    cuts_call: bool = False  # it stopped inside the arguments of a call

    @property
    def all_parts(self) -> tuple[Part, ...]:
        if self.parts is not None:
            return self.parts
        return (Content(self.text),) if self.text else ()


@dataclass(slots=True)
class FinishedChoice:
    text: str = ""  # complete at the end
    tokens: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    cumulative_logprob: float | UnsetType = UNSET  # with beam search and best_of
    parts: list[Part] = field(default_factory=list)  # in order, if a reader splits the text
    stopped_by: str = ""  # the stop string at its end
    cuts_call: bool = False  # it stopped inside the arguments of a call
    # Parts with their tokens, in order, if log probabilities are reported.
    reported: list[tuple[Sequence[Part], Sequence[TokenLogprobs]]] = field(default_factory=list)

    @property
    def all_parts(self) -> list[Part]:
        return self.parts or ([Content(self.text)] if self.text else [])


@dataclass(frozen=True, slots=True)
class Reading:
    """Makes readers that split choices into thoughts, content and calls.

    Attributes:
        shown: control tokens that the reader needs to see.
    """

    make: Callable[[], Reader]
    shown: frozenset[int]


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
