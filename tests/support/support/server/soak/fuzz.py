"""Malformed requests for every route that the server documents."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

from support.server.soak.server import Server, SoakError
from support.server.soak.wire import Connection

USER = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {
    "messages": [USER], "prompt": "x", "input": "x", "model": "echo", "max_tokens": 3,
}  # fmt: skip
# Excludes 256 to 272: those tokens make an echo misbehave.
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, -0.5, 1e308, 2**31, 2**63, -(2**70),
    "", "x", "auto", "none", "\0", "é🎈" * 40, "x" * 2000, "((a+)+)+$",
    [], [1, 1], [[]], [None], ["x"] * 70, [USER] * 40, [{}],
    {}, {"type": "x"}, {"type": "json_schema"}, {"type": "function"}, {"regex": "("},
]  # fmt: skip


def nested(depth: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


class Fuzz:
    """Makes requests from a server's document.

    Args:
        document: the OpenAPI document.
        seed: of all random choices.
    """

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._dice = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._routes: list[tuple[str, str, list[str]]] = []  # method, path, fields
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                if not path.startswith("/admin/v1/events"):  # an endless stream
                    self._routes.append((method.upper(), path, self._fields(route)))

    def _fields(self, route: dict[str, Any]) -> list[str]:
        if "requestBody" not in route:
            return []
        reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        return list(self._schemas[reference.rpartition("/")[2]]["properties"])

    def next(self) -> tuple[str, str, bytes]:
        """Method, path and body: some fields right, others wrong, and the body perhaps damaged."""
        dice = self._dice
        posts = [route for route in self._routes if route[2]]
        method, path, fields = dice.choice(posts if dice.random() < 0.9 else self._routes)
        while "{" in path:
            before, _, rest = path.partition("{")
            name = dice.choice(["x", "resp_1", "%00", "..%2f", "0", "-1", "echo"])
            path = before + name + rest.partition("}")[2]
        if not fields:
            return method, path, b""
        body = {name: value for name, value in BASE.items() if name in fields}
        for _ in range(dice.randrange(4)):
            value = nested(dice.randrange(200)) if dice.random() < 0.05 else dice.choice(JUNK)
            body[dice.choice(fields)] = value
        data = bytearray(json.dumps(body, ensure_ascii=dice.random() < 0.5).encode())
        if dice.random() < 0.2:
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        return method, path, bytes(data)


async def fuzz(server: Server, *, count: int, seed: int = 17, clients: int = 8) -> dict[str, int]:
    """Send many requests; return how often each status came.

    Raises:
        SoakError: a status is 500 or more, or the server is not as before.
    """
    async with Connection(server.url) as connection:
        document = json.loads((await connection.ask("GET", "/openapi.json")).body)
    requests = Fuzz(document, seed)
    statuses: Counter[str] = Counter()
    left = count

    async def client() -> None:
        nonlocal left
        async with Connection(server.url) as connection:
            while left > 0:
                left -= 1
                method, path, body = requests.next()
                reply = await connection.ask(method, path, body)
                statuses[str(reply.status)] += 1
                if reply.status >= 500:
                    raise SoakError(f"{reply.status} for {method} {path} {body!r}: {reply.body!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    await server.check()
    return dict(sorted(statuses.items()))
