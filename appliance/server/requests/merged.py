"""Merges streams of deltas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.process.generation import Generation


async def merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, SequenceDelta], None]:
    """Yield the deltas of several generations as they arrive, with the generation's index.

    It needs no closing: it has no tasks of its own.

    Args:
        generations: sources; the caller closes them.

    Raises:
        Exception: the first failure of a generation.
    """
    following = dict(enumerate(generations))
    while following:
        changed = asyncio.get_running_loop().create_future()
        for number, generation in list(following.items()):
            while (delta := generation.ready()) is not None:
                yield number, delta
            if generation.is_over(then=changed):
                del following[number]
        if following:
            await changed
