"""Merges the stats of several engine processes into one."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from appliance.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import Sequence

# Not summed: sizes of one block or state, values of the last step, and the shared folder on disk.
_LARGEST = frozenset(
    {
        *("block_size", "state_bytes", "step_seconds", "model_seconds", "kv_disk_writing"),
        *("kv_disk_blocks", "kv_disk_bytes", "kv_disk_capacity_bytes"),
    }
)


def merged_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    merged: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(stats, name) for stats in all_stats]
        if name in _LARGEST:
            merged[name] = max(values)
        elif isinstance(values[0], tuple):
            merged[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            merged[name] = sum(values)
    return EngineStats(**merged)
