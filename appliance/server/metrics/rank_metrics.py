"""The metrics of each rank of a model: a process that holds a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.server.metrics.metric_families import gauge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from appliance.engine.process.replicas.replica_set import ServedEngine


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
