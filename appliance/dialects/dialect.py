"""One model's dialect: its form of thoughts and calls, and the readers of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.dialects.output import Output
from appliance.dialects.source import Source
from appliance.dialects.thoughts import then_content

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.dialects.formats.form import CallForm, Schemas
    from appliance.dialects.output import Part
    from appliance.dialects.source import Steps
    from appliance.dialects.thoughts import ThoughtMarks

_ANY_TEXT = "."  # begins no mark, call or white space


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one model's thoughts and calls.

    Attributes:
        form: how it writes calls.
        lists_tools: its template lists the tools.
        writes_calls: its template renders earlier calls and their results.
        text_arguments: its template takes arguments as JSON text instead of an object.
        takes_system: its template takes a system message.
        thought_marks: around its thoughts; None if there are none or the form has them.
        wants_parts: its template reads contents as lists of parts alone, not as texts.
    """

    form: CallForm
    lists_tools: bool
    writes_calls: bool
    text_arguments: bool
    takes_system: bool
    thought_marks: ThoughtMarks | None
    wants_parts: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that readers need to see even if they are control tokens."""
        return (*self.form.marks, *(self.thought_marks or ()))

    @property
    def splits_any(self) -> bool:
        """True if answers need a reader even without tools."""
        return self.form.framed or self.thought_marks is not None

    @property
    def budget_marks(self) -> ThoughtMarks | None:
        """The marks of a thought that a budget can cut short."""
        return self.form.thought_marks or self.thought_marks

    def begins_thinking(self, prompt_end: str) -> bool:
        marks = self.thought_marks
        return marks is not None and prompt_end.rstrip().endswith(marks.opening)

    def reader(
        self,
        schemas: Schemas | None,
        *,
        thinking: bool = False,
        one_call: bool = False,
        must_call: bool = False,
        begun: str | None = None,
    ) -> Reader:
        """Build the reader of one answer.

        Args:
            schemas: JSON Schema of the arguments of each tool; None if no tool may be called.
            thinking: the answer begins inside a thought.
            one_call: ignore everything after the first call.
            must_call: the answer must be calls; a repeated one ends it.
            begun: marks before the text that the answer continues; None if it begins anew.
        """

        def read(source: Source) -> Steps[None]:
            if schemas is None and not self.form.framed:
                yield from source.until((), source.output.content)
            else:
                yield from self.form.read(source, schemas or {})

        parse = then_content(self.thought_marks, thinking, read)
        reader = Reader(parse, one_call=one_call, must_call=must_call)
        if begun is not None:
            reader.push(begun + _ANY_TEXT)
        return reader


class Reader:
    """Reads one answer.

    Args:
        parse: the parser, see `Dialect.reader`.
        one_call: ignore everything after the first call.
        must_call: the answer must be calls; a repeated one ends it.
    """

    def __init__(
        self,
        parse: Callable[[Source], Steps[None]],
        *,
        one_call: bool = False,
        must_call: bool = False,
    ) -> None:
        self._must_call = must_call
        self._output = Output(one_call=one_call, ends_on_repeat=must_call)
        self._source = Source(self._output)
        self._steps = parse(self._source)

    @property
    def ended(self) -> bool:
        """True if it ignores further text."""
        return self._output.ended

    @property
    def thinking(self) -> bool:
        """True if the next text belongs to a thought, as far as known."""
        return self._source.thinking

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that are final."""
        self._source.feed(text)
        next(self._steps, None)
        return self._output.take()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """End the text and return the last parts.

        Args:
            cut: the answer was cut off; drop an unreadable beginning of a part.
        """
        self._source.close(cut=cut, must_call=self._must_call)
        for _ in self._steps:
            pass
        self._output.close()
        return self._output.take()
