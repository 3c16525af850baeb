"""Splits one streamed answer into thoughts, content and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.dialects.output import Output
from appliance.dialects.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.dialects.parts import Part
    from appliance.dialects.source import Steps


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
