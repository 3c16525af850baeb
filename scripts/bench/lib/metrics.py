"""Adds up samples of /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample


def sum_of(samples: list[Sample], name: str, labels: Mapping[str, str] | None = None) -> float:
    """Add up the samples of that name that have these labels."""
    wanted = (labels or {}).items()
    return sum(s.value for s in samples if s.name == name and wanted <= s.labels.items())
