"""Pieces of a choice's text as they become final, and choices that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from appliance.dialects import Content, Part
from appliance.engine.nouns.messages import TokenLogprobs
from appliance.engine.nouns.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.dialects import Reader


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
