"""An engine process under supervision, whose engine repeats its prompt."""

from __future__ import annotations

import itertools
import sys
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.runs.waiting import LIMIT

from appliance.config import EngineConfig
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.client import EngineClient
from appliance.engine.process.supervisor import SupervisionLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKER = Path(__file__).with_name("echo_worker.py")
ECHO = (sys.executable, str(WORKER))
EOS = 256
DIE, REFUSE, BREAK, HANG, FAIL, BUSY = 264, 265, 266, 267, 268, 269  # see echo_worker.py
LIMITS = SupervisionLimits(step_timeout=LIMIT, backoff=0.01)
ids = itertools.count()


async def end_tokens() -> tuple[int, ...]:
    return (EOS,)


@asynccontextmanager
async def running(
    model: str = "", limits: SupervisionLimits = LIMITS, **config: Any
) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(model=model, **config), command=ECHO, limits=limits)
    await client.start(end_tokens, lambda stage, done, total: None)
    try:
        yield client
    finally:
        await client.close()


def request(*prompt: int, **sampling: Any) -> Request:
    return Request(
        request_id=f"r{next(ids)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
    )


async def tokens(client: EngineClient, asked: Request) -> list[int]:
    found: list[int] = []
    with closing(client.generate(asked)) as deltas:
        async for delta in deltas:
            found += delta.token_ids
    return found


def idle(client: EngineClient) -> bool:
    stats = client.stats
    return stats.running == stats.waiting == stats.blocks_active == 0 and not any(
        client.metadata or [1]
    )
