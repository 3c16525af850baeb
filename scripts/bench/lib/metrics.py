"""Read /metrics of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from bench.lib.load import fetch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample

    from bench.lib.load import Endpoint


async def read_metrics(endpoint: Endpoint) -> list[Sample]:
    """Return all samples; none where there is no such page.

    Raises:
        OSError: there is no connection.
    """
    status, page = await fetch(endpoint, "/metrics")
    if status != 200:
        return []
    families = text_string_to_metric_families(page.decode())
    return [sample for family in families for sample in family.samples]


def sum_of(samples: list[Sample], name: str, labels: Mapping[str, str] | None = None) -> float:
    """Add up the samples of that name that have these labels."""
    wanted = (labels or {}).items()
    return sum(s.value for s in samples if s.name == name and wanted <= s.labels.items())
