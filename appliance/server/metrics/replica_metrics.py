"""Metrics of each replica of a model, and of the ranks that divide one.

Separate families: labels on the sums in `engine_metrics` would make dashboards count twice. A model
with one process has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.engine.process.supervisor import EngineState
from appliance.server.metrics.metric_families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from appliance.engine.process.replica_set import ServedEngine


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


class RankCollector(Collector):
    """Collects metrics of the ranks of all replicas of a model; none if each has one process."""

    def __init__(self, model_id: str, engine: ServedEngine) -> None:
        self._model_id, self._engine = model_id, engine

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families; the registry calls it."""
        each = [
            ({"model_name": self._model_id, "replica": str(place), "rank": str(rank)}, one)
            for place, replica in enumerate(self._engine.replicas)
            if replica.info is not None
            for rank, one in enumerate(replica.info.ranks)
        ]
        if not each:
            return
        yield gauge(
            "appliance_rank_memory_bytes",
            "Memory of a rank's part, by what takes it.",
            [
                ({**labels, "part": part}, size)
                for labels, one in each
                for part, size in (("weights", one.weight_bytes), ("kv_cache", one.kv_bytes))
            ],
        )
        for name, text, values in (
            ("share", "Share of the model beside other ranks'.", [one.share for _, one in each]),
            (
                "copy_bytes_per_second",
                "Bytes that it read and wrote per second when it was measured.",
                [one.bytes_per_second for _, one in each],
            ),
        ):
            # What was not measured is left out.
            samples = [
                (labels, value) for (labels, _), value in zip(each, values, strict=True) if value
            ]
            yield gauge(f"appliance_rank_{name}", text, samples)
        links = [
            ({**labels, "path": one.link.path}, one.link)
            for labels, one in each
            if one.link is not None
        ]
        yield gauge(
            "appliance_rank_link_seconds",
            "A short message between it and rank 0, one way, when it was tested.",
            [(labels, link.seconds) for labels, link in links],
        )
        yield gauge(
            "appliance_rank_link_bytes_per_second",
            "Long messages between them, when they were tested.",
            [(labels, link.bytes_per_second) for labels, link in links],
        )
