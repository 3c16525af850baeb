"""The front of a cluster: how it handles answers, deaths and refusals of replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from appliance.cluster.front import (
    BLOCK_SIZE,
    BYTES_A_TOKEN,
    ChosenReplica,
    ReplicaRequest,
    make_front,
    text_hashes,
)
from appliance.config import ServerConfig

KEY = "a-key-of-a-test"
CHAT = "/v1/chat/completions"

Script = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Replicas:
    """Servers that answer each request by a script, and record the requests."""

    def __init__(self) -> None:
        self.targets: list[ChosenReplica] = []
        self.asked: list[tuple[str, bytes, bytes]] = []  # replica, head and body
        self.choices: list[ReplicaRequest] = []

    async def choose(self, asked: ReplicaRequest) -> ChosenReplica | None:
        self.choices.append(asked)
        return next((one for one in self.targets if one.name not in asked.tried), None)

    @asynccontextmanager
    async def serving(self, *scripts: Script) -> AsyncIterator[None]:
        servers = []
        for number, script in enumerate(scripts):
            server = await asyncio.start_server(self._answering(str(number), script), "127.0.0.1")
            port = server.sockets[0].getsockname()[1]
            self.targets.append(ChosenReplica(str(number), f"http://127.0.0.1:{port}"))
            servers.append(server)
        try:
            yield
        finally:
            for server in servers:
                server.close()

    def _answering(self, name: str, script: Script) -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            ]
            body = await reader.readexactly(length[0]) if length else b""
            self.asked.append((name, head, body))
            await script(writer)
            writer.close()

        return answer


class Client:
    """Calls an ASGI application and records each message as it arrives."""

    def __init__(self, config: ServerConfig, choose: Any) -> None:
        self._app = make_front(config, choose)
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def ask(
        self, path: str, body: Any = None, *, method: str = "POST", **headers: str
    ) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "client": ("127.0.0.1", 5),
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"content-type", b"application/json"),
                *(
                    (name.replace("_", "-").encode(), text.encode())
                    for name, text in headers.items()
                ),
            ],
        }
        sent = [
            {"type": "http.request", "body": b"" if body is None else msgspec.json.encode(body)}
        ]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError

        await self._app(scope, receive, self.messages.put)  # type: ignore[arg-type]

    async def close(self) -> None:
        events = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]

        async def receive() -> dict[str, Any]:
            return events.pop()

        answers: list[Any] = []

        async def send(message: Any) -> None:
            answers.append(message["type"])

        await self._app({"type": "lifespan"}, receive, send)
        assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    async def answer(self, *args: Any, **more: Any) -> tuple[int, bytes]:
        await self.ask(*args, **more)
        start, *bodies = [self.messages.get_nowait() for _ in range(self.messages.qsize())]
        assert not bodies[-1].get("more_body")
        return start["status"], b"".join(one["body"] for one in bodies)


def whole(status: int, body: Any, *headers: str) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        content = json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} x",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
            *headers,
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)

    return script


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def stream(*pieces: bytes, cut: bool = False, gate: asyncio.Queue[None] | None = None) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if gate is not None:
                await gate.get()
        if not cut:
            writer.write(b"0\r\n\r\n")

    return script


async def dies(writer: asyncio.StreamWriter) -> None:
    """End without an error message."""


def frame(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


Make = Callable[..., Client]


@pytest.fixture
async def make(replicas: Replicas) -> AsyncIterator[Make]:
    made: list[Client] = []

    def make_one(choose: Any = replicas.choose, **settings: Any) -> Client:
        made.append(Client(ServerConfig(**settings), choose))
        return made[-1]

    yield make_one
    for client in made:
        await client.close()


@pytest.fixture
def client(make: Make) -> Client:
    return make()


async def test_every_frame_is_sent_before_the_next_one_exists(
    replicas: Replicas, client: Client
) -> None:
    gate: asyncio.Queue[None] = asyncio.Queue()
    frames = [frame(text) for text in "abc"]
    async with replicas.serving(stream(*frames, gate=gate)):
        asking = asyncio.create_task(client.ask(CHAT, ASKED))
        start = await client.messages.get()
        assert start["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        for expected in frames:
            assert (await client.messages.get())["body"] == expected
            gate.put_nowait(None)
        await asking
    assert client.messages.get_nowait() == {
        "type": "http.response.body",
        "body": b"",
        "more_body": False,
    }


async def test_a_replica_that_dies_before_its_answer_is_replaced(
    replicas: Replicas, client: Client
) -> None:
    async with replicas.serving(dies, whole(200, {"ok": 1})):
        assert await client.answer(CHAT, ASKED) == (200, b'{"ok": 1}')
    assert [name for name, _, _ in replicas.asked] == ["0", "1"]
    assert replicas.asked[0][2] == replicas.asked[1][2] == msgspec.json.encode(ASKED)


async def test_one_that_had_sent_only_comments_is_replaced_within_the_stream(
    replicas: Replicas, client: Client
) -> None:
    comment = b": keep-alive\n\n"
    async with replicas.serving(stream(comment, cut=True), stream(frame("a"))):
        assert await client.answer(CHAT, ASKED) == (200, comment + frame("a"))


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        (CHAT, frame("a"), b'"code":"engine_unavailable"}}\n\n'),
        ("/v1/messages", b"event: x\n" + frame("a"), b'"type":"api_error"'),
    ],
)
async def test_a_stream_that_had_begun_ends_with_its_protocols_error(
    replicas: Replicas, client: Client, path: str, begin: bytes, end: bytes
) -> None:
    cut = stream(begin, frame("half")[:9], cut=True)
    async with replicas.serving(cut, stream(frame("other"))):
        status, body = await client.answer(path, ASKED)
    assert status == 200
    assert body.startswith(begin)
    assert end in body.removeprefix(begin)
    assert b"half" not in body, "half a frame would spoil the next one"
    assert len(replicas.asked) == 1


async def test_one_that_refuses_is_replaced_and_the_last_refusal_is_told(
    replicas: Replicas, client: Client
) -> None:
    busy, drains = whole(503, {"error": "busy"}), whole(503, {"error": "drains"})
    async with replicas.serving(busy, whole(200, [])):
        assert await client.answer(CHAT, ASKED) == (200, b"[]")
    replicas.targets.clear()
    async with replicas.serving(busy, drains):
        assert await client.answer(CHAT, ASKED) == (503, b'{"error": "drains"}')
    replicas.targets.clear()
    async with replicas.serving(whole(400, {"error": "yours"}), whole(200, [])):
        assert await client.answer(CHAT, ASKED) == (400, b'{"error": "yours"}')


async def test_what_two_engines_died_of_is_refused(replicas: Replicas, client: Client) -> None:
    died = whole(503, {}, "x-engine-died: true")
    async with replicas.serving(dies, died, whole(200, [])):
        status, body = await client.answer(CHAT, ASKED)
        assert (status, len(replicas.asked)) == (500, 2)
        assert json.loads(body)["error"]["code"] == "request_ends_engine"
        assert (await client.answer(CHAT, ASKED))[0] == 500
        assert len(replicas.asked) == 2, "it is refused without asking"
        other = {**ASKED, "max_tokens": 3}
        assert (await client.answer(CHAT, other))[0] == 500, "it met the same replicas"


async def test_one_that_cannot_be_reached_counts_against_nobody(
    replicas: Replicas, client: Client
) -> None:
    gone = ChosenReplica("gone", "http://127.0.0.1:9")
    for _ in range(3):
        replicas.targets[:] = [gone]
        async with replicas.serving(whole(200, [])):
            assert (await client.answer(CHAT, ASKED))[0] == 200
    replicas.targets[:] = [gone]
    status, body = await client.answer(CHAT, ASKED)
    assert status == 503
    assert b"can be reached" in body


async def test_no_replica_for_long_is_an_outage(make: Make) -> None:
    async def never(asked: ReplicaRequest) -> ChosenReplica | None:
        raise TimeoutError

    client = make(never)
    status, body = await client.answer("/v1/messages", ASKED)
    assert status == 503
    assert b"takes requests" in body


async def test_a_stored_response_is_found_on_the_replica_that_made_it(
    replicas: Replicas, client: Client
) -> None:
    async with replicas.serving(whole(404, {}), whole(200, {"id": "resp_1"})):
        answer = await client.answer("/v1/responses/resp_1", method="GET")
    assert answer == (200, b'{"id": "resp_1"}')
    assert b"GET /v1/responses/resp_1 HTTP" in replicas.asked[0][1]


async def test_keys_are_checked_at_the_front_and_passed_on(replicas: Replicas, make: Make) -> None:
    client = make(api_key=KEY)
    async with replicas.serving(whole(200, [])):
        assert (await client.answer(CHAT, ASKED))[0] == 401
        assert (await client.answer(CHAT, ASKED, authorization="Bearer wrong-key"))[0] == 401
        assert not replicas.asked
        answer = await client.answer(
            CHAT, ASKED, authorization=f"Bearer {KEY}", x_forwarded_for="6.6.6.6"
        )
        assert answer[0] == 200
    head = replicas.asked[0][1].lower()
    assert f"authorization: bearer {KEY}".encode() in head
    assert b"x-request-id" in head
    assert b"6.6.6.6" not in head


@pytest.mark.parametrize("path", ["/metrics", "/admin/v1/events", "/v1/load_lora_adapter"])
async def test_routes_of_one_replica_say_where_to_ask(client: Client, path: str) -> None:
    status, body = await client.answer(path, {})
    assert status == 404
    assert b"appliance cluster status" in body


async def test_a_body_beyond_the_limit_is_refused_before_it_is_passed_on(
    replicas: Replicas, make: Make
) -> None:
    client = make(max_body_bytes=1024)
    async with replicas.serving(whole(200, [])):
        assert (await client.answer(CHAT, {"messages": "x" * 2000}))[0] == 413
    assert not replicas.asked


async def test_open_requests_are_counted_for_the_choice(replicas: Replicas, client: Client) -> None:
    gate: asyncio.Queue[None] = asyncio.Queue()
    async with replicas.serving(stream(frame("a"), gate=gate)):
        asking = asyncio.create_task(client.ask(CHAT, ASKED))
        await client.messages.get()
        assert replicas.choices[0].num_open == {"0": 1}
        gate.put_nowait(None)
        await asking
    assert not replicas.choices[0].num_open


BLOCK_BYTES = BLOCK_SIZE * BYTES_A_TOKEN


def hashes(owner: str = "", **fields: Any) -> list[bytes]:
    return text_hashes(msgspec.json.encode(fields), owner, BLOCK_SIZE)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_longer_conversation_begins_with_the_hashes_of_the_shorter_one() -> None:
    talk = [said("system", "Be brief. " * 20), said("user", "Why is the sky blue? " * 9)]
    before = hashes(messages=talk)
    after = hashes(messages=[*talk, said("assistant", "It scatters. " * 20)])
    assert before
    assert after[: len(before)] == before
    assert len(after) > len(before)
    longer = hashes(prompt="once upon a time " * 30)
    assert longer[:3] == hashes(prompt="once upon a time " * 15)[:3]


def test_hashes_tell_models_owners_and_salts_apart_but_not_sampling() -> None:
    text = "x" * 2 * BLOCK_BYTES
    base = hashes(prompt=text, model="a")
    assert base == hashes(prompt=text, model="a", temperature=1.5, stream=True)
    for other in (
        hashes(prompt=text, model="b"),
        hashes("anna", prompt=text, model="a"),
        hashes(prompt=text, model="a", cache_salt="s"),
        hashes(system="y", prompt=text, model="a"),
    ):
        assert not set(other) & set(base)


def test_what_is_no_json_object_has_no_hashes() -> None:
    assert text_hashes(b"{", "", BLOCK_SIZE) == text_hashes(b"[1]", "", BLOCK_SIZE) == []
    assert hashes(prompt="short") == []
