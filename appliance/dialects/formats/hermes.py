"""`<tool_call>` around a JSON object: Hermes, Qwen 2.5 and 3, and models without a form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.dialects.call_object import call_object, read_call_object
from appliance.dialects.formats.form import read_content

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.source import Source, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes:
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

    name = "hermes"
    marks: tuple[str, ...] = (OPENING, CLOSING)
    short_ids = False
    framed = False

    def recognises(self, text: str, tool: str) -> bool:
        """Whether a template wrote a call in this form."""
        return OPENING in text and "{" in text.partition(OPENING)[2].partition(tool)[0]

    def write(self, name: str, arguments: str) -> str:
        """A call in this form."""
        return f"{OPENING}\n{call_object(name, arguments)}\n{CLOSING}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer."""

        def read_call(opening: str) -> Steps[None]:
            yield from source.skip_space()
            yield from read_call_object(source)
            yield from source.closing(CLOSING)

        yield from read_content(source, (OPENING,), read_call)
