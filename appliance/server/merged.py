"""Merges streams of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.messages import SequenceDelta
    from appliance.engine.process.generation import Generation


async def merged(
    generations: Sequence[Generation], max_queued: int
) -> AsyncGenerator[tuple[int, SequenceDelta], None]:
    """Yield the deltas of several generations as they arrive, with the generation's index.

    Args:
        generations: sources; the caller closes them.
        max_queued: deltas to take ahead of the consumer.
    """
    # The rest waits in its generation, which aborts for a slow consumer.
    queue: asyncio.Queue[tuple[int, SequenceDelta] | Exception | None] = asyncio.Queue(max_queued)

    async def pump(number: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await queue.put((number, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(generations)]
    open_generations = len(tasks)
    try:
        while open_generations:
            item = await queue.get()
            if item is None:
                open_generations -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
