"""Bounds the queue in requests and tokens, and estimates the wait for room."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from appliance.errors import QueueFullError

if TYPE_CHECKING:
    from appliance.config import ServerConfig
    from appliance.engine.process.replica_set import ServedEngine
    from appliance.server.http.key_ring import KeyRing
    from appliance.server.metrics.metrics import Metrics

UNKNOWN_RETRY_AFTER = 2.0  # seconds, before the first start
MAX_RETRY_AFTER = 300.0


class Queue:
    """Requests submitted to the engine and not yet started.

    Args:
        keys: the keys that share the queue.
    """

    def __init__(
        self, config: ServerConfig, engine: ServedEngine, metrics: Metrics, keys: KeyRing
    ) -> None:
        self._config = config
        self._engine = engine
        self._metrics = metrics
        self._keys = keys

    def has_room(self, requests: int = 1, tokens: int = 0) -> bool:
        """Return True if this many more requests and prompt tokens can run or wait.

        One prompt of any length may wait alone.
        """
        return self._excess(requests) <= 0 and self._fits(tokens)

    def check(self, owner: str, requests: int = 1, tokens: int = 0) -> None:
        """Refuse a key's requests if the queue is full.

        A full queue still admits a key below its share.

        Raises:
            QueueFullError: too many wait; estimates the wait from the starts of the last minute.
        """
        if self.has_room(requests, tokens):
            return
        own, keys = self._engine.num_waiting_of(owner), len(self._keys())
        if self._fits(tokens) and keys > 1 and own + requests <= self._config.max_queue // keys:
            return
        self._metrics.count_shed(owner)
        whose = f", {own} of this key" if keys > 1 else ""
        waiting = self._engine.num_waiting
        if not self._fits(tokens):
            whose += f", {self._engine.num_waiting_tokens:,} tokens in all"
        raise QueueFullError(
            f"{waiting} requests wait already{whose}; try again in a moment",
            retry_after=self._seconds_until_room(requests),
        )

    @property
    def slots(self) -> int:
        """Sequences that the loaded replicas run at once."""
        infos = [one.info for one in self._engine.replicas]
        return sum(0 if info is None else info.max_num_seqs for info in infos)

    def _excess(self, requests: int) -> int:
        """Return the number of requests that must start first."""
        engine = self._engine
        room = self._config.max_queue + max(0, self.slots - engine.num_running_sequences)
        return engine.num_waiting + requests - room

    def _fits(self, tokens: int) -> bool:
        waiting = self._engine.num_waiting_tokens
        return not waiting or waiting + tokens <= self._config.max_queue_tokens

    def _seconds_until_room(self, requests: int) -> int:
        rate = self._metrics.queue_wait.rate(time.monotonic())
        seconds = max(1, self._excess(requests)) / rate if rate else UNKNOWN_RETRY_AFTER
        return math.ceil(min(seconds, MAX_RETRY_AFTER))
