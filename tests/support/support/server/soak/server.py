"""The server under test as its operator sees it: processes, metrics, and whether it is idle."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil
from support.runs.waiting import until
from support.server.soak.wire import Connection

QUIET = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "appliance_sequences_running",
    "appliance_sequences_waiting",
)


class SoakError(AssertionError):
    """The server violated what a soak requires."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds: resident bytes of its processes, and open files of the API process."""

    rss: int
    files: int


class Server:
    """A running server.

    Args:
        url: its address.
        pid: of its API process.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.process = psutil.Process(pid)

    def held(self) -> Held:
        """What the server holds now."""
        processes = [self.process, *self.process.children(recursive=True)]
        return Held(sum(one.memory_info().rss for one in processes), self.process.num_fds())

    async def metrics(self) -> dict[str, float]:
        """Values of all metrics; one with labels by its name and labels."""
        async with Connection(self.url) as connection:
            reply = await connection.ask("GET", "/metrics")
        if reply.status != 200:
            raise SoakError(f"/metrics is {reply.status}")
        lines = re.findall(r"^([^#\s]\S*) (\S+)$", reply.body.decode(), re.M)
        return {name: float(value) for name, value in lines}

    async def rest(self) -> dict[str, float]:
        """Wait until the server is idle and holds no block; return the metrics then."""
        found: dict[str, float] = {}

        async def rests() -> bool:
            nonlocal found
            found = await self.metrics()
            return not any(
                value
                for name, value in found.items()
                if name.startswith(QUIET) or _is_block_in_use(name)
            )

        await until(rests, lambda: f"something is still in work: {found}")
        return found

    async def check(self) -> None:
        """Wait until the server is idle, and check that nothing leaked or was restarted.

        Raises:
            SoakError: something leaked or was restarted.
        """
        found = await self.rest()
        restarts = sum(v for n, v in found.items() if n.startswith("appliance_engine_restarts"))
        if restarts:
            raise SoakError(f"the engine was restarted {restarts:.0f} times")
        async with Connection(self.url) as connection:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            reply = await connection.post("/v1/chat/completions", body)
        if reply.status != 200:
            raise SoakError(f"a plain chat is a {reply.status}: {reply.body.decode()}")


def _is_block_in_use(name: str) -> bool:
    return name.startswith("appliance_kv_blocks{") and 'state="active"' in name
