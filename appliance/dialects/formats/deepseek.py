"""DeepSeek's marks around a name and JSON arguments: V3 and R1, and V3.1 without the fence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.json_calls import read_arguments
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_FENCE, _FENCE_END = "```json", "```"


class DeepSeek(CallForm):
    """`function<sep>f`, then a fenced object; or `f<sep>` and the object. Reads both.

    Args:
        fenced: write the first form.
    """

    marks: tuple[str, ...] = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)
    opening = CALLS

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced
        self.name = "deepseek (fenced)" if fenced else "deepseek"

    def recognises(self, text: str, tool: str) -> bool:
        return CALL in text and self._fenced == (f"{SEPARATOR}{tool}" in text)

    def write(self, name: str, arguments: str) -> str:
        call = f"{name}{SEPARATOR}{arguments}"
        if self._fenced:
            call = f"function{SEPARATOR}{name}\n{_FENCE}\n{arguments}\n{_FENCE_END}"
        return f"{CALLS}{CALL}{call}{CALL_END}{CALLS_END}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        head, tail = lark.marks(CALL, name, SEPARATOR), lark.marks(CALL_END, CALLS_END)
        if self._fenced:
            head = lark.marks(CALL, "function", SEPARATOR, f"{name}\n{_FENCE}\n")
            tail = lark.marks(f"\n{_FENCE_END}", CALL_END, CALLS_END)
        return f"{head} {lark.schema(schema)} {tail}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_calls(opening: str) -> Steps[None]:
            if opening == CALLS:
                yield from source.skip_space()
                if not (yield from source.literal(CALL)):
                    raise MalformedCallError
            while True:
                yield from _read_call(source)
                if not (yield from source.closing(CALL)):
                    break
            yield from source.closing(CALLS_END)

        yield from read_content(source, (CALLS, CALL), read_calls)


def _read_call(source: Source) -> Steps[None]:
    name = (yield from source.scalar("<")).strip()
    if not (yield from source.literal(SEPARATOR)):
        raise MalformedCallError
    if (yield from source.peek()) != "{":
        name = (yield from source.scalar("\n`")).strip()
        yield from source.skip_space()
        if not (yield from source.literal(_FENCE)):
            raise MalformedCallError
        yield from source.skip_space()
    if not name:
        raise MalformedCallError
    source.begin_call(name)
    yield from read_arguments(source, source.output.arguments)
    yield from source.closing(_FENCE_END)
    yield from source.closing(CALL_END)
    source.output.end_call()
