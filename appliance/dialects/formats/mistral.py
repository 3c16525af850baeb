"""`[TOOL_CALLS]` with a JSON list, or with names and arguments: Mistral before and since 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.json_calls import call_object, read_arguments, read_call_object
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

OPENING, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(CallForm):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`; reads both.

    Args:
        named: write the second form.
    """

    marks: tuple[str, ...] = (OPENING, ID, ARGUMENTS)
    opening = OPENING
    short_ids = True

    def __init__(self, *, named: bool) -> None:
        self._named = named
        self.name = "mistral" if named else "mistral (list)"

    def recognises(self, text: str, tool: str) -> bool:
        return OPENING in text and self._named == (ARGUMENTS in text)

    def write(self, name: str, arguments: str) -> str:
        if self._named:
            return f"{OPENING}{name}{ARGUMENTS}{arguments}"
        return f"{OPENING} [{call_object(name, arguments)}]"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        if self._named:
            return f"{lark.marks(name, ARGUMENTS)} {lark.schema(schema)}"
        head = f' [{{"name": "{name}", "arguments": '
        return f"{lark.mark(head)} {lark.schema(schema)} {lark.mark('}]')}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_calls(opening: str) -> Steps[None]:
            yield from source.skip_space()
            if not (yield from source.literal("[")):
                yield from _read_named(source)
                return
            while True:
                yield from source.skip_space()
                yield from read_call_object(source)
                yield from source.skip_space()
                if not (yield from source.literal(",")):
                    break
            yield from source.closing("]")

        yield from read_content(source, (OPENING,), read_calls)


def _read_named(source: Source) -> Steps[None]:
    name = (yield from source.scalar("[{\n")).strip()
    if not name:
        raise MalformedCallError
    if (yield from source.literal(ID)):
        yield from source.scalar("[{\n")
    if not (yield from source.literal(ARGUMENTS)) and (yield from source.peek()) != "{":
        raise MalformedCallError
    source.begin_call(name)
    yield from source.skip_space()
    yield from read_arguments(source, source.output.arguments)
    source.output.end_call()
