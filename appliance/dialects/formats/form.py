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

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by tool


class CallForm(ABC):
    """One way in which models write calls.

    Attributes:
        name: for people.
        marks: texts that the parser must see, even if they are control tokens.
        opening: the mark before a call; empty if there is none.
        between: text between two calls; None if a turn has only one.
        short_ids: the ids of calls must be nine letters and digits.
        thought_marks: around thoughts, if they belong to the form.
        framed: the whole answer is between marks, so it is read even without tools.
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
        """Return True if a template that rendered this for a call has this form."""

    @abstractmethod
    def write(self, name: str, arguments: str) -> str:
        """Write a call as the model should, given its arguments as JSON."""

    @abstractmethod
    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer after its first thought."""

    @abstractmethod
    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        """Return the Lark grammar that follows the opening in a call of that tool."""

    def remarks(self, lark: Lark) -> str:
        """Return the grammar of text before a call or an answer, in a framed form."""
        return ""

    def plain(self, lark: Lark, text: str | None = None) -> str:
        """Return the grammar of an answer without a call; `text` is its text's rule, None any."""
        return text or lark.without(self.opening)


def read_content(
    source: Source, openings: tuple[str, ...], read_calls: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Read content with calls in it.

    Args:
        source: the answer.
        openings: marks that begin calls.
        read_calls: reads what follows such a mark; if it fails before a call begins, all of it
            is content.
    """
    while (opening := (yield from source.until(openings, source.output.content))) is not None:
        source.attempt(opening)
        try:
            yield from read_calls(opening)
        except MalformedCallError:
            source.give_up()
        else:
            source.drop_attempt()
