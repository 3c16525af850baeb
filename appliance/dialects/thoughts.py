"""Reads thoughts: text between two marks before the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from appliance.dialects.source import Source, Steps


class ThoughtMarks(NamedTuple):
    opening: str
    closing: str


# Searched in this order.
KNOWN_MARKS = (
    ThoughtMarks("<|channel>thought", "<channel|>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("<think>", "</think>"),
)


def find_marks(template: str) -> ThoughtMarks | None:
    """Find a template's marks; many have only the closing one, to strip thoughts."""
    return next((marks for marks in KNOWN_MARKS if marks.closing in template), None)


def read_thought(source: Source, marks: ThoughtMarks, *, begun: bool) -> Steps[None]:
    """Read a thought at the beginning of an answer, if there is one.

    Args:
        begun: the prompt already contains the opening mark.
    """
    source.thinking = begun
    source.attempt("")
    yield from source.skip_space()
    if not (yield from source.literal(marks.opening)) and not begun:
        source.give_up()  # only white space
        return
    source.thinking = True
    source.drop_attempt()
    source.output.begin_thought()
    yield from source.until((marks.closing,), source.output.thought)
    source.thinking = False
    # A budget may force the mark while the model writes it.
    source.attempt("")
    yield from source.skip_space()
    if (yield from source.literal(marks.closing)):
        source.drop_attempt()
    else:
        source.give_up()


def then_content(
    marks: ThoughtMarks | None,
    begun: bool,
    read_content: Callable[[Source], Steps[None]],
) -> Callable[[Source], Steps[None]]:
    """Return a parser for an optional thought and then content."""

    def parse(source: Source) -> Steps[None]:
        if marks is not None:
            yield from read_thought(source, marks, begun=begun)
        yield from read_content(source)

    return parse
