"""Reads a server's /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from appliance.bench.load import fetch

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from appliance.bench.load import Endpoint


async def read_metrics(endpoint: Endpoint, *names: str) -> list[Sample]:
    """Return all samples, or those with these name prefixes; none if there is no such page.

    Parsing a whole page takes milliseconds and disturbs a server on the same machine.

    Raises:
        OSError: the connection failed.
    """
    status, page = await fetch(endpoint, "/metrics")
    if status != 200:
        return []
    text = page.decode()
    if names:
        text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(names))
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]
