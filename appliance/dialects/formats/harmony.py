"""Harmony, the channels of gpt-oss: thoughts, remarks, calls and the answer are messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from appliance.dialects.json_text import read_value
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.source import Source, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class Harmony:
    """Each message has a head, that says its channel and for whom it is, and a text."""

    name = "harmony"
    marks: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    short_ids = False
    framed = True

    def recognises(self, text: str, tool: str) -> bool:
        """Whether a template wrote a call in this form."""
        return CHANNEL in text and f"to=functions.{tool}" in text

    def write(self, name: str, arguments: str) -> str:
        """A call in this form."""
        head = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json"
        return f"{head}{MESSAGE}{arguments}<|call|>"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        """Read an answer, message by message."""
        output = source.output
        while (yield from source.peek()):
            source.attempt("")
            head: list[str] = []
            found = yield from source.until((MESSAGE, *ENDS), head.append)
            text = "".join(head)
            if found is None and CHANNEL not in text and not text.lstrip().startswith("to="):
                source.give_up()  # a text without a head
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
                output.thought("\n")  # after another one
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
