"""Harmony, gpt-oss's format: thoughts, remarks, calls and the answer are messages on channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.form import CallForm
from appliance.dialects.json_calls import read_value
from appliance.dialects.source import MalformedCallError
from appliance.dialects.thoughts import ThoughtMarks

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class Harmony(CallForm):
    """Messages: a head with channel and recipient, then text."""

    name = "harmony"
    marks: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    opening = CHANNEL
    thought_marks = ThoughtMarks(f"{CHANNEL}analysis{MESSAGE}", ENDS[0])
    framed = True

    def recognises(self, text: str, tool: str) -> bool:
        return CHANNEL in text and f"to=functions.{tool}" in text

    def write(self, name: str, arguments: str) -> str:
        head = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json"
        return f"{head}{MESSAGE}{arguments}<|call|>"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        head = lark.marks(f"commentary to=functions.{name} ", CONSTRAIN, "json", MESSAGE)
        return f"{head} {lark.schema(schema)} {lark.mark(ENDS[1])}"

    def remarks(self, lark: Lark) -> str:
        text = f"{lark.mark(MESSAGE)} {lark.until(ENDS[0])} {lark.marks(START, 'assistant')}"
        return f'({lark.mark(CHANNEL)} ("analysis" | "commentary") {text})*'

    def resumed(self, lark: Lark, start: str, *, after_text: bool) -> str:
        end = lark.until(ENDS[0]) if after_text else lark.mark(ENDS[0])
        return f"{end} {lark.marks(START, 'assistant')} {start}"

    def plain(self, lark: Lark, text: str | None = None) -> str:
        return f"{lark.marks(CHANNEL, 'final', MESSAGE)} {text or lark.without(ENDS[2])}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        output = source.output
        while (yield from source.peek()):
            source.attempt("")
            head: list[str] = []
            found = yield from source.until((MESSAGE, *ENDS), head.append)
            text = "".join(head)
            if found is None and CHANNEL not in text and not text.lstrip().startswith("to="):
                source.give_up()  # text without a head
                return
            if found != MESSAGE:
                if CHANNEL not in text:
                    source.give_up()
                source.drop_attempt()
                continue
            source.drop_attempt()
            if recipient := _RECIPIENT.search(text):
                source.begin_call(recipient[1])
                yield from _read_json(source)
                yield from source.until(ENDS, lambda text: None)
                output.end_call()
            elif "analysis" in text.partition(CHANNEL)[2]:
                source.thinking = True
                output.thought("\n")  # after an earlier thought
                yield from source.until((*ENDS, START), output.thought)
                source.thinking = False
            else:
                yield from source.until((*ENDS, START), output.content)


def _read_json(source: Source) -> Steps[None]:
    yield from source.skip_space()
    try:
        yield from read_value(source, source.output.arguments)
    except MalformedCallError:
        return
