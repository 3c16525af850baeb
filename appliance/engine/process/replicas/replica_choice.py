"""Chooses a request's replica among those that can take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.process.engine_state import EngineState
from appliance.engine.process.replicas.router import ReplicaLoad, ReplicaRouter, prompt_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.request import Request
    from appliance.engine.process.client import EngineClient


class ReplicaChoice:
    """The router, and its facts about each replica's process."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas
        self._router = ReplicaRouter[int]()
        for place in range(len(replicas)):
            self._router.begin(place, 0)
        self._block_size = 0
        self._pids: list[int | None] = [None] * len(replicas)  # known to the router

    def choose(self, request: Request, but: int | None = None) -> EngineClient | None:
        """Return the best replica for a request; None if none accepts it.

        Args:
            but: number of an excluded replica.
        """
        able = [
            place != but and replica.state.accepts for place, replica in enumerate(self._replicas)
        ]
        if not any(able):
            return None
        awake = [replica.state is EngineState.READY for replica in self._replicas]
        # One that is silent unusually long gets nothing while another is there.
        alive = [
            one and (replica.responsive or replica.state is not EngineState.READY)
            for one, replica in zip(able, self._replicas, strict=True)
        ]
        able = alive if any(alive) else able
        self._tell_router()
        loads = {
            place: ReplicaLoad(replica.num_sequences, awake[place])
            for place, replica in enumerate(self._replicas)
            if able[place]
        }
        hashes = prompt_hashes(request, self._block_size) if self._router.uses_hashes else []
        return self._replicas[self._router.route(hashes, loads)]

    def _tell_router(self) -> None:
        """Reset the router's records of ended processes."""
        for place, replica in enumerate(self._replicas):
            if replica.info is not None and replica.pid != self._pids[place]:
                self._pids[place] = replica.pid
                info = replica.info
                blocks = info.num_blocks if replica.config.prefix_caching else 0
                # Host memory keeps evicted blocks of the same size.
                blocks += blocks * info.kv_host_bytes // max(1, info.kv_bytes)
                self._router.begin(place, blocks)
                self._block_size = info.block_size
