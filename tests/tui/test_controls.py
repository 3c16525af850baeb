from __future__ import annotations

import msgspec
import pytest

from appliance.events import BlockTable, TableEntry
from appliance.tui.controls import ControlError, Controls
from appliance.tui.look import SequenceKey
from appliance.tui.server import Server
from tests.tui.conftest import EventServer, page

TABLE = BlockTable(
    request_id="chatcmpl-1",
    index=0,
    num_tokens=40,
    blocks=(
        TableEntry(7, "ab" * 16, 2, 0),
        TableEntry(9, "cd" * 16, 1, 0),
        TableEntry(8, "", 1, 0),
    ),
)


async def test_a_request_is_aborted_with_the_key(event_server: EventServer) -> None:
    event_server.pages["/admin/v1/requests/chatcmpl-1/abort"] = page(b'{"aborted": true}')
    await Controls(Server.at(event_server.url, "secret")).abort("chatcmpl-1")
    (request,) = event_server.requests
    assert request.startswith("POST /admin/v1/requests/chatcmpl-1/abort ")
    assert "authorization: bearer secret" in request.lower()


async def test_a_block_table_is_read(event_server: EventServer) -> None:
    path = "/admin/v1/sequences/chatcmpl-1/0/blocks"
    event_server.pages[path] = page(msgspec.json.encode(TABLE))
    controls = Controls(Server.at(event_server.url, None))
    assert await controls.block_table(SequenceKey("chatcmpl-1", 0)) == TABLE


async def test_ids_cannot_lead_to_other_paths(event_server: EventServer) -> None:
    event_server.answers = [page(b"{}")]
    await Controls(Server.at(event_server.url, None)).abort("../../v1/x?y#z")
    assert event_server.requests[0].startswith(
        "POST /admin/v1/requests/..%2F..%2Fv1%2Fx%3Fy%23z/abort "
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (page(b'{"error": {"message": "no such request"}}', "404 Not Found"), "no such request"),
        (page(b"<html>", "502 Bad Gateway"), "the server answered 502 Bad Gateway"),
    ],
)
async def test_a_refusal_is_told_in_words(
    event_server: EventServer, answer: object, words: str
) -> None:
    event_server.answers = [answer]  # type: ignore[list-item]
    with pytest.raises(ControlError, match=words):
        await Controls(Server.at(event_server.url, None)).abort("x")


async def test_nonsense_is_no_table(event_server: EventServer) -> None:
    event_server.answers = [page(b"[]")]
    with pytest.raises(ControlError, match="cannot be read"):
        await Controls(Server.at(event_server.url, None)).block_table(SequenceKey("x", 0))


async def test_nobody_there(event_server: EventServer) -> None:
    await event_server.stop()
    with pytest.raises(ControlError):
        await Controls(Server.at(event_server.url, None)).abort("x")
