"""A bare JSON object with `parameters`: Llama 3.1 to 3.3, which also write Python calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.formats.pythonic import read_list
from appliance.dialects.json_calls import call_object, read_call_object
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

PYTHON_TAG = "<|python_tag|>"


class Llama(CallForm):
    """`{"name": "f", "parameters": {}}`, at the beginning of an answer or after a mark.

    Any answer can be JSON, so an object is a call only if it names a tool.
    """

    name = "llama"
    marks: tuple[str, ...] = (PYTHON_TAG,)
    opening = ""

    def recognises(self, text: str, tool: str) -> bool:
        return f'{{"name": "{tool}", "parameters":' in text

    def write(self, name: str, arguments: str) -> str:
        return call_object(name, arguments, key="parameters")

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        head = f'{{"name": "{name}", "parameters": '
        return f"{lark.mark(head)} {lark.schema(schema)} {lark.mark('}')}"

    def plain(self, lark: Lark, text: str | None = None) -> str:
        """Return the grammar of an answer that does not begin like a call."""
        return text or lark.rule(r"/\s*([^{\s](.|\n)*)?/")

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_calls(opening: str) -> Steps[None]:
            while True:
                yield from source.skip_space()
                yield from read_call_object(source, schemas.__contains__)
                yield from source.skip_space()
                source.attempt("")
                if not (yield from source.literal(";")):
                    break

        source.attempt("")
        try:
            yield from source.skip_space()
            if (yield from source.peek()) == "[":
                yield from read_list(source, schemas)
            else:
                yield from read_calls("")
        except MalformedCallError:
            source.give_up()
        else:
            source.drop_attempt()
        yield from read_content(source, (PYTHON_TAG,), read_calls)
