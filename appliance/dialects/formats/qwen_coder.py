"""`<function=f>` with a mark for each argument: Qwen3-Coder and related models."""

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
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoder(CallForm):
    """Marks around the name and each argument; models sometimes omit the outermost."""

    name = "qwen coder"
    marks: tuple[str, ...] = (OPENING, CLOSING)
    opening = OPENING
    between = "\n"

    def recognises(self, text: str, tool: str) -> bool:
        return f"{FUNCTION}{tool}>" in text

    def write(self, name: str, arguments: str) -> str:
        values = "".join(
            f"{PARAMETER}{key}>\n{value}\n{PARAMETER_END}\n"
            for key, value in bare(arguments).items()
        )
        return f"{OPENING}\n{FUNCTION}{name}>\n{values}{FUNCTION_END}\n{CLOSING}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        values = bare_arguments(schema, lark, (PARAMETER,), (">\n",), (f"\n{PARAMETER_END}\n",))
        head, tail = lark.mark(f"\n{FUNCTION}{name}>\n"), lark.marks(f"{FUNCTION_END}\n", CLOSING)
        return f"{head} {values} {tail}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_call(opening: str) -> Steps[None]:
            if opening == OPENING:
                yield from source.skip_space()
                if not (yield from source.literal(FUNCTION)):
                    raise MalformedCallError
            name = (yield from source.scalar(">\n<")).strip()
            if not name or not (yield from source.literal(">")):
                raise MalformedCallError
            source.begin_call(name)
            writer = ArgumentWriter(source, schemas.get(name, {}))
            while (yield from source.closing(PARAMETER)):
                key = (yield from source.scalar(">\n<")).strip()
                if not (yield from source.literal(">")):
                    break
                yield from source.literal("\n")
                if not (yield from writer.read(key, "\n" + PARAMETER_END, PARAMETER_END)):
                    return
            complete = yield from source.closing(FUNCTION_END)
            complete |= yield from source.closing(CLOSING)
            if complete or (yield from source.peek()):
                writer.close()
            source.output.end_call()

        yield from read_content(source, (OPENING, FUNCTION), read_call)
