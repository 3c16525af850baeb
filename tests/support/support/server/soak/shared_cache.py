"""Two servers that share a folder of KV blocks, one of which is killed and restarted."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from support.server.soak.mixed import text_of
from support.server.soak.server import Server, SoakError
from support.server.soak.start import model_server
from support.server.soak.wire import Connection

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, WORDS, TOKENS = 8, 400, 12


async def _answers(server: Server, prompts: list[str]) -> tuple[list[str], int]:
    """Greedy continuations of concurrent requests, and how many prompt tokens came from a cache."""

    async def ask(prompt: str) -> dict[str, Any]:
        async with Connection(server.url) as connection:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            reply = await connection.post("/v1/completions", body)
        if reply.status != 200:
            raise SoakError(f"{reply.status}: {reply.body!r}")
        found: dict[str, Any] = json.loads(reply.body)
        return found

    found = await asyncio.gather(*map(ask, prompts))
    cached = sum(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found)
    return [one["choices"][0]["text"] for one in found], cached


def shared_cache(folder: Path, model: Path, *, rounds: int, seed: int = 17) -> dict[str, Any]:
    """Ask two servers that share a folder the same requests, while one is killed again and again.

    Args:
        folder: for their files.
        model: file or folder.
        rounds: how often the second server is killed.
        seed: of the requests.

    Raises:
        SoakError: an answer differs from that of a server without such a folder, the servers do not
            use its blocks, or one of them is not as before.
    """
    dice = random.Random(seed)
    prompts = [text_of(dice, WORDS) for _ in range(PROMPTS)]
    (folder / "alone").mkdir()
    with model_server(folder / "alone", model) as alone:
        # One after another: the rows that share a step may change a rounding.
        expected = [asyncio.run(_answers(alone, [one]))[0][0] for one in prompts]
    cache, cached = str(folder / "kv"), 0
    with ExitStack() as stack:
        (folder / "first").mkdir()
        first = stack.enter_context(model_server(folder / "first", model, APPLIANCE_KV_DISK=cache))
        for number in range(rounds + 1):
            place = folder / f"second{number}"
            place.mkdir()
            with model_server(place, model, APPLIANCE_KV_DISK=cache) as second:
                # Its memory is empty, so that its hits come from the folder.
                cached += asyncio.run(_answers(second, prompts))[1]
                asyncio.run(_answers(first, dice.sample(prompts, PROMPTS // 2)))
                for server in (first, second):
                    for prompt, wanted in zip(prompts, expected, strict=True):
                        text = asyncio.run(_answers(server, [prompt]))[0][0]
                        if text != wanted:
                            raise SoakError(f"round {number}: {text!r} instead of {wanted!r}")
                asyncio.run(second.check())
                if number < rounds:
                    second.process.send_signal(signal.SIGKILL)
        asyncio.run(first.check())
    if not cached:
        raise SoakError("nothing came from the folder")
    return {"deaths": rounds, "cached_tokens": cached}
