"""Dashboard routes: the feed of `appliance.events`, block tables, the quality card, aborts."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from appliance.errors import QueueFullError, RequestError
from appliance.events import BlockTable
from appliance.server.dashboard.watcher import Watcher
from appliance.server.http.errors import json_response
from appliance.server.http.openapi import describes
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.server.dashboard.block_feed import BlockFeed
    from appliance.server.models.state import ServerState

MAX_WATCHERS = 16


class Aborted(msgspec.Struct, frozen=True):
    """Answer to an abort."""

    aborted: bool


class GoneError(RequestError):
    """The request or sequence is not live."""

    status = 404


class NotYoursError(RequestError):
    """Another key sent the request."""

    status = 403
    type = "permission_error"


logger = logging.getLogger(__name__)


def admin_router(server: ServerState) -> APIRouter:
    router = APIRouter()
    watchers: set[Watcher] = set()

    @router.get("/admin/v1/events", **describes(None, None, media_types=("text/event-stream",)))
    async def events(request: Request) -> Response:
        feed = await asyncio.to_thread(_new_feed)
        replica = _replica(request.query_params.get("replica", "0"))
        watcher = Watcher(server, feed, key_name(request.scope), replica)
        return EventStream(
            watcher.frames(),
            holds=_counted(watchers, watcher),
            gzip=accepts_gzip(request.headers.get("accept-encoding", "")),
        )

    @router.get(
        "/admin/v1/sequences/{request_id}/{index}/blocks",
        **describes(None, BlockTable, path=("request_id", "index")),
    )
    async def blocks(request: Request) -> Response:
        """Return the physical blocks of a sequence in logical order."""
        request_id, index = request.path_params["request_id"], request.path_params["index"]
        choice = int(index) if index.isdecimal() and len(index) < 8 else -1
        model = server.holder_of(request_id) or server.default
        engine = model.engine.replica_of(request_id)
        owner = engine.owner_of(request_id)
        table = await engine.fetch_table(request_id, choice)
        metadata = engine.metadata
        if not table.blocks or metadata is None:
            raise GoneError("no such sequence holds blocks now")
        from appliance.server.dashboard.block_feed import table_entries

        if owner is None or not server.may_manage(key_name(request.scope), owner):
            # Hashes would let someone who guesses a prompt verify the guess.
            table = msgspec.structs.replace(table, hashes=b"")
        return json_response(
            BlockTable(
                request_id=request_id,
                index=choice,
                num_tokens=table.num_tokens,
                blocks=table_entries(table, metadata),
            )
        )

    @router.post(
        "/admin/v1/requests/{request_id}/abort", **describes(None, Aborted, path=("request_id",))
    )
    async def abort(request: Request) -> Response:
        """Abort a request in any phase; its client gets an error."""
        request_id = request.path_params["request_id"]
        engine = (server.holder_of(request_id) or server.default).engine
        holder = key_name(request.scope)
        owner = engine.owner_of(request_id)
        if owner is None:
            raise GoneError("no such request is open")
        if not server.may_manage(holder, owner):
            raise NotYoursError(
                f"this request is of {owner!r}; a key can end its own, and only the key without "
                "a name those of others"
            )
        engine.cancel(request_id)
        logger.info("%s: ended by a dashboard%s", request_id, f" of {holder}" if holder else "")
        return json_response(Aborted(aborted=True))

    @router.get("/admin/v1/quality", **describes(None, None))
    async def quality(request: Request) -> Response:
        """Return a model's quality card, as in `quality.json`; null if there is none."""
        card = server.find(request.query_params.get("model")).quality_card
        content = b"null" if card is None else card.as_json
        return Response(content, media_type="application/json")

    return router


@contextmanager
def _counted(watchers: set[Watcher], watcher: Watcher) -> Iterator[None]:
    """Count a dashboard while it watches, or raise QueueFullError."""
    if len(watchers) >= MAX_WATCHERS:
        raise QueueFullError(f"{MAX_WATCHERS} dashboards watch already", retry_after=5)
    watchers.add(watcher)
    try:
        yield
    finally:
        watchers.discard(watcher)


def accepts_gzip(header: str) -> bool:
    """Return True if an Accept-Encoding header names gzip with a quality above 0."""
    for offer in header.lower().split(","):
        name, _, weight = offer.replace(" ", "").partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


def _new_feed() -> BlockFeed:
    """Import numpy, 12 MiB, only for the first dashboard."""
    from appliance.server.dashboard.block_feed import BlockFeed

    return BlockFeed()


def _replica(text: str) -> int:
    """Parse a replica's number, or raise RequestError."""
    if not (text.isdecimal() and len(text) < 4):
        raise RequestError(f"replica must be a number from 0, got {text[:20]!r}", param="replica")
    return int(text)
