"""The form in which one model writes, and the readers of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.dialects.reader import Reader
from appliance.dialects.thoughts import then_content

if TYPE_CHECKING:
    from appliance.dialects.formats.form import CallForm, Schemas
    from appliance.dialects.source import Source, Steps
    from appliance.dialects.thoughts import ThoughtMarks


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one model's thoughts and calls.

    Attributes:
        form: of its calls.
        lists_tools: its template shows it what tools there are.
        writes_calls: its template writes earlier calls and their results.
        text_arguments: its template takes arguments as JSON text, not as an object.
        takes_system: its template takes a system message.
        thought_marks: around its thoughts; None if it has none, or if they are part of the form.
    """

    form: CallForm
    lists_tools: bool
    writes_calls: bool
    text_arguments: bool
    takes_system: bool
    thought_marks: ThoughtMarks | None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that readers have to see even where they are control tokens."""
        return (*self.form.marks, *(self.thought_marks or ()))

    @property
    def splits_any(self) -> bool:
        """True if answers have to be read even without tools."""
        return self.form.framed or self.thought_marks is not None

    @property
    def budget_marks(self) -> ThoughtMarks | None:
        """The marks around a thought that can be cut short."""
        return self.form.thought_marks or self.thought_marks

    def begins_thinking(self, prompt_end: str) -> bool:
        """Return True if an answer to a prompt with this end begins within a thought."""
        marks = self.thought_marks
        return marks is not None and prompt_end.rstrip().endswith(marks.opening)

    def reader(
        self,
        schemas: Schemas | None,
        *,
        thinking: bool = False,
        one_call: bool = False,
        must_call: bool = False,
    ) -> Reader:
        """A reader of one answer.

        Args:
            schemas: of the arguments of the tools that may be called; None if none may be.
            thinking: whether the answer begins within a thought.
            one_call: ignore all that follows the first call.
            must_call: the answer has to be a call; a call that comes again ends it.
        """

        def read(source: Source) -> Steps[None]:
            if schemas is None and not self.form.framed:
                yield from source.until((), source.output.content)
            else:
                yield from self.form.read(source, schemas or {})

        parse = then_content(self.thought_marks, thinking, read)
        return Reader(parse, one_call=one_call, must_call=must_call)
