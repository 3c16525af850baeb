"""What every form of a call can do, and the loop that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.source import Source, Steps

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the tool


class CallForm(Protocol):
    """One way in which models write calls.

    Attributes:
        name: for people.
        marks: texts to be shown to the parser, also where they are control tokens.
        short_ids: calls are told apart by nine letters and digits, and by nothing else.
        framed: all of an answer stands between marks, so that it is read even without tools.
    """

    name: str
    marks: tuple[str, ...]
    short_ids: bool
    framed: bool

    def recognises(self, text: str, tool: str) -> bool:
        """Whether a template that wrote this for a call of that tool has this form."""
        ...

    def write(self, name: str, arguments: str) -> str:
        """A call as the model is to write it, with its arguments as JSON."""
        ...

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer after its first thought."""
        ...


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
