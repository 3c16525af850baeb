"""Many clients that read streams for a while, during which the server's memory must not grow."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from typing import Any

from support.runs.waiting import until
from support.server.soak.server import Server, SoakError
from support.server.soak.wire import Connection

MIB = 1 << 20
WORKER_FILES = 16  # processes that render chats start when they are needed
# The end of a complete stream: it has all requested tokens.
WHOLE = re.compile(rb'"finish_reason": ?"length".*\ndata: \[DONE\]\n\n\Z', re.DOTALL)


async def streams(
    server: Server,
    *,
    clients: int,
    seconds: float,
    growth_mib: float = 64.0,
    seed: int = 17,
) -> dict[str, Any]:
    """Let clients ask one chat after another, all of them streamed.

    The first tenth of the time is the warm-up, whose memory is the baseline; at the end no more
    files may be open than before.

    Args:
        server: under test.
        clients: at once.
        seconds: in all.
        growth_mib: that the resident memory may grow by after the warm-up.
        seed: of the requests.

    Raises:
        SoakError: an answer is neither whole nor a polite refusal, the memory or the open files
            grow, or the server is not as before.
    """
    dice = random.Random(seed)
    before = server.held()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    statuses: Counter[str] = Counter()
    firsts: list[float] = []

    async def client() -> None:
        async with Connection(server.url) as connection:
            while loop.time() < begin + seconds:
                body = {
                    "messages": [{"role": "user", "content": "a word " * dice.randrange(1, 30)}],
                    "max_tokens": dice.randrange(8, 120),
                    "ignore_eos": True,
                    "stream": True,
                }
                reply = await connection.post("/v1/chat/completions", body)
                statuses[str(reply.status)] += 1
                if reply.status == 200 and WHOLE.search(reply.body):
                    firsts.append(reply.first)
                elif reply.status != 429:
                    raise SoakError(f"{reply.status}: {reply.body[-500:]!r}")
                else:
                    await asyncio.sleep(1.0)  # as many as the answer asks for

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
        await asyncio.sleep(seconds / 10)
        warm = server.held()
        await asyncio.sleep(seconds * 0.85)
        held = server.held()
    await server.check()
    grown = (held.rss - warm.rss) / MIB
    if grown > growth_mib:
        raise SoakError(f"the memory grew by {grown:.0f} MiB")
    await until(
        lambda: server.process.num_fds() <= before.files + WORKER_FILES,
        lambda: f"open files went from {before.files} to {server.process.num_fds()}",
    )
    firsts.sort()
    return {
        "answers": dict(statuses),
        "first_byte_p50": round(firsts[len(firsts) // 2], 3),
        "first_byte_p99": round(firsts[len(firsts) * 99 // 100], 3),
        "rss_mib": [round(warm.rss / MIB), round(held.rss / MIB)],
        "files": [before.files, held.files, server.process.num_fds()],
    }
