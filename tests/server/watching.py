"""A client of the feed that dashboards read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.events import Event, decode_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.server.conftest import Running

EVENTS = "/admin/v1/events"


async def watch(running: Running) -> AsyncGenerator[Event, None]:
    async with running.http.stream("GET", EVENTS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                event = decode_event(name, line.removeprefix("data: "))
                assert event is not None
                yield event
