"""Passes an administrator's adapter requests to the engine, and its answers back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import AdapterAnswer, LoadAdapter, UnloadAdapter
from appliance.engine.process.engine_state import EngineState
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.request import AdapterRef
    from appliance.engine.process.supervisor import Supervisor


class AdapterCalls:
    """Adapters being read."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._asked: dict[AdapterRef, asyncio.Future[AdapterAnswer]] = {}

    async def load(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; wakes a sleeping engine.

        Raises:
            RequestError: the adapter is unusable.
        """
        asked = self._asked.get(ref)
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._asked[ref] = asked
            if self._supervisor.state is EngineState.READY:
                self._supervisor.send(LoadAdapter(ref))
            else:
                self._supervisor.wake()
        # Cancelling one caller must not cancel the answer for others.
        answer = await asyncio.shield(asked)
        if answer.error:
            raise RequestError(answer.error, param="lora_path")

    def unload(self, ref: AdapterRef) -> None:
        """Forget an adapter after the last request that uses it."""
        self._supervisor.send(UnloadAdapter(ref))

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def begin(self) -> None:
        """Send the requests that arrived before the engine was ready."""
        for ref in self._asked:
            self._supervisor.send(LoadAdapter(ref))

    def take(self, answers: Iterable[AdapterAnswer]) -> None:
        """Pass answers on to their callers."""
        for answer in answers:
            asked = self._asked.pop(answer.ref, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)

    def forget(self) -> None:
        """End all calls after the engine has ended."""
        self.take([AdapterAnswer(ref, "the engine ended while it read it") for ref in self._asked])
