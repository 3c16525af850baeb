"""The queue's bounds in requests and tokens, and the time until there is room again."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from appliance.errors import QueueFullError

if TYPE_CHECKING:
    from appliance.config import ServerConfig
    from appliance.engine.process.client import EngineClient
    from appliance.server.key_ring import KeyRing
    from appliance.server.metrics import Metrics

UNKNOWN_RETRY_AFTER = 2.0  # seconds, while nothing has been started that would tell
MAX_RETRY_AFTER = 300.0


class Queue:
    """Requests that the engine has been given and has not started.

    Args:
        metrics: what was started lately, and whom there was no room for.
        keys: that share the queue.
    """

    def __init__(
        self, config: ServerConfig, engine: EngineClient, metrics: Metrics, keys: KeyRing
    ) -> None:
        self._config = config
        self._engine = engine
        self._metrics = metrics
        self._keys = keys

    def has_room(self, requests: int = 1, tokens: int = 0) -> bool:
        """Return True if that many more requests, with that many prompt tokens, can run or wait.

        However long it is, a prompt may wait where no other does.
        """
        return self._excess(requests) <= 0 and self._fits(tokens)

    def check(self, owner: str, requests: int = 1, tokens: int = 0) -> None:
        """Make sure that requests of a key may come.

        When the queue is full, a key that has less than its share of it waiting still gets in.

        Raises:
            QueueFullError: too many wait already; it says when there will be room at the rate at
                which requests were started in the last minute.
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

    def _excess(self, requests: int) -> int:
        """Return the number of requests that have to start first."""
        engine = self._engine
        slots = 0 if engine.info is None else engine.info.max_num_seqs
        room = self._config.max_queue + max(0, slots - engine.num_running_sequences)
        return engine.num_waiting + requests - room

    def _fits(self, tokens: int) -> bool:
        waiting = self._engine.num_waiting_tokens
        return not waiting or waiting + tokens <= self._config.max_queue_tokens

    def _seconds_until_room(self, requests: int) -> int:
        rate = self._metrics.queue_wait.rate(time.monotonic())
        seconds = max(1, self._excess(requests)) / rate if rate else UNKNOWN_RETRY_AFTER
        return math.ceil(min(seconds, MAX_RETRY_AFTER))
