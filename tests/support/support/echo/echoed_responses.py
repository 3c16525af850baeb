"""Requests to `/v1/responses` of an echoing engine, and the events of its answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from openai.types.responses import FunctionToolParam

    from tests.server.conftest import Running

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🎈"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = f"<think>\nHm, 🎈.\n</think>\n\nLet me see.\n{OSLO}{ROME}"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "Now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream: each named, numbered and valid by the client's own types."""
    response = await running.http.post("/v1/responses", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    events = []
    for frame in response.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
