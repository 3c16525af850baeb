"""Commands of the dashboard to a server: fetch a block table, abort a request."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import msgspec

from appliance.events import BlockTable

if TYPE_CHECKING:
    from appliance.tui.look import SequenceKey
    from appliance.tui.server import Server

_TIMEOUT = 5.0  # seconds


class ControlError(Exception):
    """The server refused or failed; the message is for the user."""


class Controls:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def abort(self, request_id: str) -> None:
        """Abort a request in any phase; raise ControlError with the reason if it fails."""
        await self._ask("POST", f"/admin/v1/requests/{quote(request_id, safe='')}/abort")

    async def block_table(self, key: SequenceKey) -> BlockTable:
        """Raises ControlError if the server does not send the table; the message says why."""
        path = f"/admin/v1/sequences/{quote(key.request_id, safe='')}/{key.choice}/blocks"
        answer = await self._ask("GET", path)
        try:
            return msgspec.json.decode(answer.content, type=BlockTable)
        except msgspec.MsgspecError as error:
            raise ControlError(f"the block table cannot be read: {error}") from error

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            async with self._server.client(_TIMEOUT) as client:
                answer = await client.request(method, self._server.path(path))
        except httpx.RequestError as error:
            raise ControlError(str(error) or type(error).__name__) from error
        if answer.status_code == 200:
            return answer
        raise ControlError(_words(answer))


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


def _words(answer: httpx.Response) -> str:
    try:
        said = msgspec.json.decode(answer.content, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        said = ""
    return said or f"the server answered {answer.status_code} {answer.reason_phrase}"
