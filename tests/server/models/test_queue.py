"""The queue's limits, and the answers to requests that exceed them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.config import ServerConfig
from appliance.config.api_keys import check_keys
from appliance.errors import QueueFullError
from appliance.server.metrics.metrics import Metrics
from appliance.server.models.queue import MAX_RETRY_AFTER, UNKNOWN_RETRY_AFTER, Queue


class Waiting:
    """An engine with two slots, both taken, and requests that wait."""

    info = SimpleNamespace(max_num_seqs=2)
    num_running_sequences = 2

    def __init__(self, **tokens: list[int]) -> None:
        self.tokens = tokens  # of each request's prompt, by owner
        self.replicas = (self,)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def num_waiting_tokens(self) -> int:
        return sum(map(sum, self.tokens.values()))

    def num_waiting_of(self, owner: str) -> int:
        return len(self.tokens.get(owner, []))


def queue_of(engine: Waiting, metrics: Metrics, **settings: Any) -> Queue:
    config = ServerConfig(**settings)
    keys = check_keys(config.api_key, config.api_keys)
    return Queue(config, engine, metrics, lambda: keys)  # type: ignore[arg-type]


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr("appliance.server.models.queue.time.monotonic", lambda: 1000.0)
    return Metrics("m")


def refused(queue: Queue, requests: int = 1, tokens: int = 1, owner: str = "anna") -> Any:
    assert not queue.has_room(requests, tokens)
    with pytest.raises(QueueFullError) as caught:
        queue.check(owner, requests, tokens)
    return caught.value


def test_whoever_finds_it_full_is_told_when_to_come_again(metrics: Metrics) -> None:
    queue = queue_of(Waiting(anna=[10] * 8), metrics, max_queue=8)
    assert refused(queue).retry_after == UNKNOWN_RETRY_AFTER
    metrics.queue_wait.add(900.0, 1.0)  # more than a minute ago
    assert refused(queue).retry_after == UNKNOWN_RETRY_AFTER
    for second in range(60):
        metrics.queue_wait.add(940.0 + second, 1.0)
    assert refused(queue).retry_after == 1
    assert refused(queue, requests=7).retry_after == 7


def test_a_slow_engine_is_not_waited_for_without_end(metrics: Metrics) -> None:
    metrics.queue_wait.add(940.0, 1.0)
    queue = queue_of(Waiting(anna=[10] * 8), metrics, max_queue=8)
    assert refused(queue).retry_after == 60
    assert refused(queue, requests=100).retry_after == MAX_RETRY_AFTER


def test_tokens_count_and_one_prompt_may_be_longer_than_all(metrics: Metrics) -> None:
    engine = Waiting()
    queue = queue_of(engine, metrics, max_queue_tokens=100)
    queue.check("anna", 1, 1000)
    engine.tokens = {"anna": [60]}
    queue.check("anna", 1, 40)
    error = refused(queue, 1, 41)
    assert "60 tokens in all" in str(error)
    assert error.status == 429


def test_a_key_with_less_than_its_share_gets_in_but_not_with_too_many_tokens(
    metrics: Metrics,
) -> None:
    keys = {"anna": "key-of-anna", "tim": "key-of-tim"}
    queue = queue_of(
        Waiting(anna=[10] * 7, tim=[10]), metrics, max_queue=8, max_queue_tokens=100, api_keys=keys
    )
    queue.check("tim", 1, 20)
    assert "7 of this key" in str(refused(queue))
    refused(queue, 1, 21, owner="tim")
