"""`<tool_call>f` with a pair of marks for each argument: GLM 4.5 and later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.bare_values import ArgumentWriter, bare, bare_arguments
from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm(CallForm):
    """The name, then keys and values in turn."""

    name = "glm"
    marks: tuple[str, ...] = (OPENING, CLOSING, KEY, KEY_END, VALUE, VALUE_END)
    opening = OPENING
    between = "\n"

    def recognises(self, text: str, tool: str) -> bool:
        return OPENING in text and KEY in text

    def write(self, name: str, arguments: str) -> str:
        values = "".join(
            f"\n{KEY}{key}{KEY_END}\n{VALUE}{value}{VALUE_END}"
            for key, value in bare(arguments).items()
        )
        return f"{OPENING}{name}{values}\n{CLOSING}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        values = bare_arguments(schema, lark, ("\n", KEY), (KEY_END, "\n", VALUE), (VALUE_END,))
        return f"{lark.mark(name)} {values} {lark.marks(chr(10), CLOSING)}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_call(opening: str) -> Steps[None]:
            name = (yield from source.scalar("<\n{")).strip()
            if not name or " " in name or (yield from source.peek()) == "{":
                raise MalformedCallError
            yield from source.skip_space()
            if (yield from source.peek()) != "<":
                raise MalformedCallError
            source.begin_call(name)
            writer = ArgumentWriter(source, schemas.get(name, {}))
            while (yield from source.closing(KEY)):
                key: list[str] = []
                if (yield from source.until((KEY_END,), key.append)) is None:
                    return
                if not (yield from source.closing(VALUE)):
                    break
                if not (yield from writer.read("".join(key), VALUE_END)):
                    return
            if (yield from source.closing(CLOSING)) or (yield from source.peek()):
                writer.close()
            source.output.end_call()

        yield from read_content(source, (OPENING,), read_call)
