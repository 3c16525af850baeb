"""A cluster's front: checks a request, chooses its replica, and streams the reply.

If a replica ends before the client has part of the answer, another one starts over; a stream that
has begun ends with an error, as with one process. A front has no tokenizer: it hashes a prompt's
text in chained blocks, as the prefix cache hashes tokens. Prompts that begin with the same text
begin with the same tokens, so the text also shows which replica has them cached. Imports no Ray.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from starlette.requests import Request

from appliance.cluster.reply import STREAMS, Reply
from appliance.engine.blocks.block_hashes import extend_chain, root_hash
from appliance.engine.process.quarantine import Quarantine
from appliance.errors import (
    ApplianceError,
    EngineDiedError,
    EngineUnavailableError,
    QuarantinedError,
    RequestError,
)
from appliance.server.dashboard.web_page import OPEN_PATHS
from appliance.server.http.body import read_bytes
from appliance.server.http.client_gone import ClientGoneError, unless_disconnected
from appliance.server.http.errors import ENGINE_DIED, error_response, request_id_of
from appliance.server.http.key_ring import KeyRing
from appliance.server.http.proxies import Proxies
from appliance.server.http.request_middleware import RequestMiddleware, key_name
from appliance.server.metrics.metrics import SharedMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from appliance.cluster.reply import RawHeaders
    from appliance.config import ServerConfig


BYTES_A_TOKEN = 4  # about, for English; in other languages it remembers more or less
# Fields with prompt text, in the order of templates. A conversation grows at the end of one of the
# last.
_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")
_TEXT = "I"  # four bytes per token
BLOCK_SIZE = 16  # tokens, estimated from the text
CONNECT_SECONDS = 5.0
_POOL_SECONDS = 15.0  # shorter than a replica's keep-alive
_RESPONSES = "/v1/responses"  # each replica has only its own
# These concern one replica, whose address is in `appliance cluster status`.
_OF_ONE = ("/admin/", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# Headers for the front alone, or for one connection.
_NOT_PASSED_ON = {
    b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect",
    b"content-length", b"origin", b"x-request-id", b"forwarded",
}  # fmt: skip
_PREFIXES_NOT_PASSED_ON = (b"x-forwarded-", b"sec-fetch-")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    """A replica that takes requests.

    Attributes:
        url: its server's, for other machines.
    """

    name: str
    url: str


@dataclass(slots=True)
class ReplicaRequest:
    """A request that needs a replica.

    Attributes:
        hashes: of the prompt's text.
        num_open: open requests of this front by replica.
        tried: names of the replicas that failed to answer it.
    """

    hashes: list[bytes]
    num_open: Counter[str]
    tried: set[str] = field(default_factory=set)


# Returns None if all replicas were tried; raises TimeoutError if none appears in time.
Choose = Callable[[ReplicaRequest], Coroutine[Any, Any, ChosenReplica | None]]


class _NotOfClustersError(RequestError):
    status = 404


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error that another replica may not give.

    Attributes:
        is_death: an engine ended while it ran the request.
    """

    status: int
    headers: RawHeaders
    body: bytes
    is_death: bool


def make_front(config: ServerConfig, choose: Choose) -> ASGIApp:
    """Build the application for a cluster's clients."""
    metrics = SharedMetrics()
    admitted = RequestMiddleware(
        Front(config, choose),
        config=config,
        keys=KeyRing(config),
        metrics=metrics,
        open_paths=OPEN_PATHS,
    )
    return Proxies(admitted, config)


class Front:
    """Forwards requests to replicas."""

    def __init__(self, config: ServerConfig, choose: Choose) -> None:
        self._config = config
        self._choose = choose
        self._num_open: Counter[str] = Counter()
        self._quarantine = Quarantine[bytes](lambda mark: mark)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except ClientGoneError:
            logger.debug("a client went away")
        except ApplianceError as error:
            await error_response(error, scope)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"].removeprefix("lifespan.")
            if event == "shutdown" and self._session is not None:
                await self._session.close()
            await send({"type": f"lifespan.{event}.complete"})
            if event == "shutdown":
                return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(_OF_ONE):
            raise _NotOfClustersError(
                f"{path} is for one replica, and this address is for all of them; ask the replica:"
                " appliance cluster status lists their addresses"
            )
        body = await read_bytes(Request(scope, receive), max_bytes=self._config.max_body_bytes)
        reply = Reply(scope, receive, send)
        await unless_disconnected(receive, self._relay(scope, body, reply))

    async def _relay(self, scope: Scope, body: bytes, reply: Reply) -> None:
        owner = "" if scope["path"] in OPEN_PATHS else key_name(scope)
        shared = self._config.share_prefixes_between_keys
        hashes = text_hashes(body, "" if shared else owner, BLOCK_SIZE) if body else []
        mark = hashlib.blake2b(f"{owner} {scope['path']} ".encode() + body, digest_size=16).digest()
        asked = ReplicaRequest(hashes, self._num_open)
        last: _Refusal | None = None
        try:
            while True:
                self._quarantine.is_suspect(mark)
                target = await self._target(asked)
                if target is None:
                    break
                asked.tried.add(target.name)
                refusal = await self._ask(target, scope, body, reply)
                if refusal is None:
                    self._quarantine.absolve(mark)
                    return
                if refusal.is_death:
                    self._quarantine.strike([mark])
                if reply.begun:
                    raise EngineDiedError("the replica that answered ended")
                last = refusal
        except (QuarantinedError, EngineDiedError, EngineUnavailableError) as error:
            await reply.fail(error)
            return
        if last is not None and last.status:
            await reply.whole(last.status, last.headers, last.body)
        else:
            await reply.fail(EngineUnavailableError("no replica of the model can be reached"))

    async def _target(self, asked: ReplicaRequest) -> ChosenReplica | None:
        try:
            return await self._choose(asked)
        except TimeoutError:
            raise EngineUnavailableError("no replica of the model takes requests") from None

    async def _ask(
        self, target: ChosenReplica, scope: Scope, body: bytes, reply: Reply
    ) -> _Refusal | None:
        """Forward a request and its answer; return an error that another replica may avoid."""
        sent = False
        try:
            with self._counted(target):
                async with self._client().request(
                    scope["method"],
                    _url(target, scope),
                    headers=_headers(scope),
                    data=body or None,
                    allow_redirects=False,
                ) as response:
                    sent = True
                    return await _take(response, scope["path"], reply)
        except aiohttp.ClientConnectorError as error:
            logger.warning("replica %s cannot be reached: %s", target.name, error)
            return _Refusal(0, (), b"", is_death=False)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            what = "answered" if sent else "was asked"
            logger.warning("replica %s ended while it %s: %r", target.name, what, error)
            return _Refusal(0, (), b"", is_death=True)

    @contextmanager
    def _counted(self, target: ChosenReplica) -> Iterator[None]:
        self._num_open[target.name] += 1
        try:
            yield
        finally:
            self._num_open[target.name] -= 1
            if not self._num_open[target.name]:
                del self._num_open[target.name]

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_POOL_SECONDS, socket_factory=_lasting_socket
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            )
        return self._session


async def _take(response: aiohttp.ClientResponse, path: str, reply: Reply) -> _Refusal | None:
    status, headers = response.status, response.raw_headers
    died = ENGINE_DIED in response.headers
    if response.content_type in STREAMS and status == 200:
        await reply.start(status, headers)
        async for data in response.content.iter_any():
            await reply.pass_on(data)
        await reply.end()
        return None
    body = await response.read()
    if status == 503 or (status == 404 and path.startswith(_RESPONSES)):
        return _Refusal(status, headers, body, is_death=died)
    await reply.whole(status, headers, body)
    return None


def _url(target: ChosenReplica, scope: Scope) -> str:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope.get("query_string") else b""
    return target.url + (path.partition(b"?")[0] + query).decode("latin-1")


def _headers(scope: Scope) -> list[tuple[str, str]]:
    passed = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _NOT_PASSED_ON and not name.startswith(_PREFIXES_NOT_PASSED_ON)
    ]
    return [*passed, ("x-request-id", request_id_of(scope))]


def _lasting_socket(address: tuple[object, ...]) -> socket.socket:
    """Make a socket that notices a dead peer within half a minute."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)  # type: ignore[arg-type]
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    made.setblocking(False)
    return made


def text_hashes(body: bytes, owner: str, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks; none if the body is no JSON object.

    Args:
        body: of a request in any protocol.
        owner: the API key; prompts of one key share the cache.
    """
    try:
        fields = msgspec.json.decode(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    text = b"\0".join(_growing(fields[name]) for name in _FIELDS if name in fields)
    words = array(_TEXT, text[: len(text) // BYTES_A_TOKEN * BYTES_A_TOKEN]).tolist()
    root = root_hash(owner, str(fields.get("model", "")), str(fields.get("cache_salt", "")))
    found: list[bytes] = []
    extend_chain(found, root, words, block_size, len(words) // block_size)
    return found


def _growing(value: Any) -> bytes:
    """Encode a value so that a longer one begins with a shorter one's bytes."""
    if isinstance(value, list):
        return b"".join(msgspec.json.encode(item) + b"," for item in value)
    return msgspec.json.encode(value)[:-1]
