"""Metrics of each replica of a model.

Separate families: labels on the sums in `engine_metrics` would make dashboards count twice. A model
with one process has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.engine.process.engine_state import EngineState
from appliance.server.metrics.metric_families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from appliance.engine.process.replicas.replica_set import ServedEngine


class ReplicaCollector(Collector):
    """Collects metrics from the last reports of a model's replicas."""

    def __init__(self, model_id: str, engine: ServedEngine) -> None:
        self._model_id, self._engine = model_id, engine

    def collect(self) -> Iterable[Metric]:
        replicas = self._engine.replicas
        if len(replicas) == 1:
            return
        model = self._model_id
        each = [
            ({"model_name": model, "replica": str(place)}, replica)
            for place, replica in enumerate(replicas)
        ]
        yield gauge(
            "appliance_replica_up",
            "1 while the replica is ready.",
            [(labels, float(one.state is EngineState.READY)) for labels, one in each],
        )
        yield gauge(
            "appliance_replica_asleep",
            "1 while it sleeps or wakes.",
            [
                (labels, float(one.state in (EngineState.ASLEEP, EngineState.WAKING)))
                for labels, one in each
            ],
        )
        yield gauge(
            "appliance_replica_requests",
            "Open requests of the replica.",
            [
                ({**labels, "state": state}, number)
                for labels, one in each
                for state, number in (("running", one.num_running), ("waiting", one.num_waiting))
            ],
        )
        yield gauge(
            "appliance_replica_kv_usage",
            "Share of the replica's KV blocks in use, 0 to 1.",
            [(labels, one.stats.kv_usage) for labels, one in each],
        )
        for name, text, values in (
            ("restarts", "Its processes after the first.", [one.restarts for one in replicas]),
            (
                "generation_tokens",
                "Tokens that it generated.",
                [one.stats.generation_tokens_total for one in replicas],
            ),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in its prefix cache.",
                [one.stats.prefix_queries_total for one in replicas],
            ),
            (
                "prefix_cache_hits",
                "Of these, found.",
                [one.stats.prefix_hits_total for one in replicas],
            ),
        ):
            samples = [(labels, value) for (labels, _), value in zip(each, values, strict=True)]
            yield counter(f"appliance_replica_{name}", text, samples)
