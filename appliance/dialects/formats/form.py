"""The interface of a call's form, and the loop that most forms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps
    from appliance.dialects.thoughts import ThoughtMarks

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the tool


class CallForm(ABC):
    """One way in which models write calls.

    Attributes:
        name: for people.
        marks: texts to be shown to the parser, also where they are control tokens.
        opening: the mark before a call; empty if there is none.
        between: what stands between two calls; None if a turn has but one.
        short_ids: calls are told apart by nine letters and digits, and by nothing else.
        thought_marks: around thoughts, where they are part of the form.
        framed: all of an answer stands between marks, so that it is read even without tools.
    """

    name: str
    marks: tuple[str, ...]
    opening: str
    between: str | None = None
    short_ids = False
    thought_marks: ThoughtMarks | None = None
    framed = False

    @abstractmethod
    def recognises(self, text: str, tool: str) -> bool:
        """Return True if a template that wrote this for a call of that tool has this form."""

    @abstractmethod
    def write(self, name: str, arguments: str) -> str:
        """A call as the model is to write it, with its arguments as JSON."""

    @abstractmethod
    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer after its first thought."""

    @abstractmethod
    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        """Return the Lark grammar that follows the opening in a call of that tool."""

    def remarks(self, lark: Lark) -> str:
        """The grammar of text before a call or an answer, where the form is framed."""
        return ""

    def plain(self, lark: Lark, text: str | None = None) -> str:
        """An answer without a call; `text` is the rule for its text, if not any will do."""
        return text or lark.without(self.opening)


def read_content(
    source: Source, openings: tuple[str, ...], read_calls: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Read content with calls in it.

    Args:
        source: the answer.
        openings: marks that begin calls.
        read_calls: what follows such a mark; where it fails before a call begins, all of it is
            content.
    """
    while (opening := (yield from source.until(openings, source.output.content))) is not None:
        source.attempt(opening)
        try:
            yield from read_calls(opening)
        except MalformedCallError:
            source.give_up()
        else:
            source.drop_attempt()
