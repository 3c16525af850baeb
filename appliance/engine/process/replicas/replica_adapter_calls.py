"""Passes adapter requests to all replicas that have a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from appliance.engine.process.engine_state import EngineState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.request import AdapterRef
    from appliance.engine.process.client import EngineClient


class ReplicaAdapterCalls:
    """An administrator's adapter requests, for all replicas; see `AdapterCalls`."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas

    async def load(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; sleeping replicas read it then.

        Raises:
            RequestError: the adapter is unusable.
        """
        awake = [one for one in self._replicas if one.state is EngineState.READY]
        awake = awake or [self._replicas[0]]
        answers = [one.adapters.load(ref) for one in awake]
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    def unload(self, ref: AdapterRef) -> None:
        """Forget an adapter after the last request that uses it."""
        for replica in self._replicas:
            replica.adapters.unload(ref)
