"""`<tool_call>` around a JSON object: Hermes, Qwen 2.5 and 3, and the default for other models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.json_calls import call_object, read_call_object

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(CallForm):
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

    name = "hermes"
    marks: tuple[str, ...] = (OPENING, CLOSING)
    opening = OPENING
    between = "\n"

    def recognises(self, text: str, tool: str) -> bool:
        return OPENING in text and "{" in text.partition(OPENING)[2].partition(tool)[0]

    def write(self, name: str, arguments: str) -> str:
        return f"{OPENING}\n{call_object(name, arguments)}\n{CLOSING}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        head = f'\n{{"name": "{name}", "arguments": '
        return f"{lark.mark(head)} {lark.schema(schema)} {lark.marks('}' + chr(10), CLOSING)}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_call(opening: str) -> Steps[None]:
            yield from source.skip_space()
            yield from read_call_object(source)
            yield from source.closing(CLOSING)

        yield from read_content(source, (OPENING,), read_call)
