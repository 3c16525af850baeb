"""Processes that each have a part of a model, in /health, /metrics and the feed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from appliance.server.dashboard.watcher import server_info
from appliance.stats import RankInfo, RankLink

if TYPE_CHECKING:
    from tests.server.conftest import Serve

LINK = RankLink("through host memory", 2.5e-5, 9e9, "peer to peer changes data")
RANKS = (
    RankInfo(
        pid=7,
        share=2,
        threads=1,
        weight_bytes=64 << 20,
        kv_bytes=8 << 20,
        bytes_per_second=12e9,
        reason="the link is slow",
    ),
    RankInfo(pid=8, share=1, threads=1, weight_bytes=32 << 20, bytes_per_second=6e9, link=LINK),
    RankInfo(pid=9, share=1, threads=2, weight_bytes=32 << 20),  # nothing is measured
)


async def test_ranks_are_in_health_metrics_and_the_feed(serve: Serve) -> None:
    async with serve() as running:
        supervisor: Any = running.engine.supervisor
        assert "ranks" not in (await running.http.get("/health")).json()
        assert "appliance_rank" not in (await running.http.get("/metrics")).text
        supervisor.info = msgspec.structs.replace(supervisor.info, ranks=RANKS)
        assert (await running.http.get("/health")).json()["ranks"] == {
            "echo": [
                "share 2, 1 thread, 64 MiB of weights and 8 of KV cache, copies 12.0 GB/s,"
                " whole layers, since the link is slow",
                "share 1, 1 thread, 32 MiB of weights, copies 6.0 GB/s, through host"
                " memory of 25.0 us and 9.0 GB/s, since peer to peer changes data",
                "share 1, 2 threads, 32 MiB of weights",
            ]
        }
        assert server_info(running.state).ranks == RANKS
        text = (await running.http.get("/metrics")).text
    found = {
        (sample.name, sample.labels["rank"], sample.labels.get("part")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "rank" in sample.labels
    }
    assert found["appliance_rank_memory_bytes", "0", "kv_cache"] == 8 << 20
    assert found["appliance_rank_memory_bytes", "1", "weights"] == 32 << 20
    assert found["appliance_rank_share", "0", None] == 2
    assert found["appliance_rank_copy_bytes_per_second", "1", None] == 6e9
    assert found["appliance_rank_link_seconds", "1", None] == 2.5e-5
    assert found["appliance_rank_link_bytes_per_second", "1", None] == 9e9
    assert ("appliance_rank_link_seconds", "0", None) not in found
    assert {name for name, rank, _ in found if rank == "2"} == {
        "appliance_rank_memory_bytes",
        "appliance_rank_share",
    }
