"""Counters of the tiers below the cache, and their statistics. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from appliance.engine.tiers.disk_tier import DiskTier
    from appliance.engine.tiers.host_store import HostStore
    from appliance.engine.tiers.write_behind import WriteBehind
    from appliance.stats import EngineStats


@dataclass(slots=True)
class TierCounters:
    """Totals; blocks unless noted."""

    swaps: int = 0  # sequences preempted with kept blocks
    swapped_out: int = 0
    swapped_in: int = 0
    host_hits: int = 0  # tokens found in host memory at first admission
    disk_hits: int = 0  # tokens

    def add_to(
        self, stats: EngineStats, host: HostStore, *, num_last: int, num_swapped: int
    ) -> EngineStats:
        """Add host memory's part to a snapshot.

        Args:
            host: blocks by hash.
            num_last: partial blocks, without a hash.
            num_swapped: waiting sequences with kept content.
        """
        return msgspec.structs.replace(
            stats,
            swaps_total=self.swaps,
            swapped_out_total=self.swapped_out,
            swapped_in_total=self.swapped_in,
            prefix_hits_host_total=self.host_hits,
            prefix_hits_disk_total=self.disk_hits,
            swapped=num_swapped,
            kv_host_blocks=len(host) + num_last,
            kv_host_swapped=host.num_swapped + num_last,
            kv_host_capacity=host.capacity,
        )


def add_disk(stats: EngineStats, disk: DiskTier, writes: WriteBehind) -> EngineStats:
    """Add the disk's part to a snapshot."""
    store, found = disk.store, disk.store.counters
    return msgspec.structs.replace(
        stats,
        kv_disk_writing=not disk.trouble,
        kv_disk_blocks=len(store),
        kv_disk_bytes=found.bytes_used,
        kv_disk_capacity_bytes=store.capacity,
        kv_disk_pending=len(writes),
        kv_disk_written_total=found.written,
        kv_disk_read_total=found.read,
        kv_disk_dropped_total=writes.num_dropped,
        kv_disk_corrupt_total=found.corrupt,
        kv_disk_evicted_total=found.evicted,
    )
