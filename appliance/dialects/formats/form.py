"""Interface of a call's form, and the reading loop that most forms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps
    from appliance.dialects.thoughts import ThoughtMarks

Schemas = Mapping[str, Mapping[str, Any]]  # JSON Schema of the arguments by tool


class CallForm(ABC):
    """One way in which models write calls.

    Attributes:
        marks: texts that the parser needs to see even if they are control tokens.
        opening: the mark before a call; empty if there is none.
        between: text between two calls; None if a turn has only one.
        short_ids: call ids must be nine letters and digits.
        thought_marks: around thoughts, if the form has them.
        framed: marks enclose the whole answer, so it needs a reader even without tools.
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
        """Return True if this is how a template of this form renders a call."""

    @abstractmethod
    def write(self, name: str, arguments: str) -> str:
        """Write a call as the model should, with JSON arguments."""

    @abstractmethod
    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer after its first thought."""

    @abstractmethod
    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        """Return the Lark grammar of a call to the tool, after the opening mark."""

    def remarks(self, lark: Lark) -> str:
        """Return the grammar of text before a call or answer, in a framed form."""
        return ""

    def resumed(self, lark: Lark, start: str, *, after_text: bool) -> str:
        """Return the grammar of the end of a begun text and of what follows, in a framed form.

        Args:
            start: grammar of an answer.
            after_text: the begun text may go on first.
        """
        return start

    def plain(self, lark: Lark, text: str | None = None) -> str:
        """Return the grammar of an answer without a call; `text` is a rule for its text."""
        return text or lark.without(self.opening)


def read_content(
    source: Source, openings: tuple[str, ...], read_calls: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Read content and calls in it.

    Args:
        openings: marks that begin calls.
        read_calls: reads the text after such a mark; if it fails before a call begins, all of it
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
