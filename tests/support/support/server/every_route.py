"""Every route of the server with a request that it answers, taken from the server's own table.

Bodies are built from the fields in a route's document. A new route with known fields is thus tried
automatically; one that needs another field fails the tests that walk the table until `FIELDS` has
it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastapi import FastAPI
    from starlette.routing import BaseRoute
    from starlette.types import Message

# A route's question is in the first of these groups of fields that it has.
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hello"}]},
    {"prompt": "hello"},
    {"input": "hello"},
    {"query": "hello", "documents": ["one", "other"]},
    {"text_1": "hello", "text_2": ["one", "other"]},
    {"tokens": [104, 105]},
    {"lora_name": "sql", "lora_path": "sql"},
    {"lora_name": "sql"},
)
FIELDS: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 4,
    "max_output_tokens": 4,
    "options": {"num_predict": 4},
}
PATHS = {"model_id": "echo", "name": "sql", "index": "0", "path": "app.js"}
ENDLESS = "/admin/v1/events"
ENDS_IN = 60.0  # seconds; only a hang takes longer


@dataclass(frozen=True)
class Call:
    """A request to one route."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    may_miss: bool = False  # it names something that may not exist: 404 is right
    again: bool = False  # a client may repeat it, by its Idempotency-Key

    def __str__(self) -> str:
        streams = "" if self.body is None or "stream" not in self.body else " whole"
        if streams and self.body is not None and self.body["stream"]:
            streams = " streamed"
        return f"{self.method} {self.path}{streams}{' again' if self.again else ''}"

    def asking(self, text: str, tokens: int) -> Call:
        """The same request with another text and number of tokens."""

        def other(value: Any) -> Any:
            if value == "hello":
                return text
            if isinstance(value, list):
                return list(map(other, value))
            return {k: other(v) for k, v in value.items()} if isinstance(value, dict) else value

        body = other(self.body)
        for name in ("max_tokens", "max_output_tokens"):
            if name in body:
                body[name] = tokens
        if "options" in body:
            body["options"] = {"num_predict": tokens}
        return replace(self, body=body)


def every_call(app: FastAPI) -> Iterator[Call]:
    """A call for each handler of the table, whole, and streamed if it can stream."""
    document = app.openapi()
    structs = document["components"]["schemas"]
    for route in {one.endpoint: one for one in _flat(app.routes)}.values():
        template = route.path.replace(":path}", "}")
        filled = template.format_map(_Paths())
        for method in sorted((route.methods or set()) - {"HEAD"}):
            of = document["paths"].get(template, {}).get(method.lower(), {})
            missing = not of or ("{" in template and "model_id" not in template)
            schema = of.get("requestBody", {}).get("content", {}).get("application/json")
            if schema is None:
                yield Call(method, filled, may_miss=missing)
                continue
            fields = structs[schema["schema"]["$ref"].rpartition("/")[2]]["properties"]
            body = {name: value for name, value in FIELDS.items() if name in fields}
            body |= next((one for one in QUESTIONS if one.keys() <= fields.keys()), {})
            missing |= "lora_name" in fields
            if "stream" not in fields:
                yield Call(method, filled, body, may_miss=missing)
                continue
            for stream in (False, True):
                yield Call(method, filled, {**body, "stream": stream})


def _flat(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """The routes of an app, including those of its routers."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from _flat(route.original_router.routes)  # type: ignore[attr-defined]


class _Paths(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return PATHS.get(name, "none")


class Client:
    """What one request sends and receives, without a socket.

    Args:
        on_send: called before each message of the answer is taken; may raise as a socket does.
    """

    def __init__(
        self,
        call: Call,
        more: dict[str, str],
        on_send: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self.messages: list[Message] = []
        self.gone = asyncio.Event()
        self.cancel: Callable[[], object] = lambda: None  # the task that answers it
        self._on_send = on_send
        body = b"" if call.body is None else json.dumps(call.body).encode()
        self._incoming: list[Message] = [{"type": "http.request", "body": body}]
        headers = {
            "host": "localhost",
            "content-length": str(len(body)),
            **({"content-type": "application/json"} if body else {}),
            **more,
        }
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 80),
            "state": {},
        }

    @property
    def status(self) -> int:
        return next((one["status"] for one in self.messages if "status" in one), 0)

    @property
    def content(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages)

    async def ended(self, task: asyncio.Task[None]) -> None:
        """Wait until the answering task ends, which it does soon after the client has gone."""
        _, goes_on = await asyncio.wait([task], timeout=ENDS_IN)
        for one in goes_on:
            one.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = " though its client has left" if self.gone.is_set() else ""
        words = f"the answer of {self.scope['path']} goes on after {ENDS_IN:.0f} seconds{left}"
        assert not goes_on, words

    async def receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._on_send(message)
        self.messages.append(message)
        if self.scope["path"] == ENDLESS and message.get("body"):
            self.gone.set()
