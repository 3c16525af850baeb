"""The statistics of recurrent states. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from appliance.engine.blocks.state_slots import StateSlots
    from appliance.stats import EngineStats


def add_states(stats: EngineStats, states: StateSlots | None) -> EngineStats:
    """Add slots and checkpoints to a snapshot that has the number of running sequences."""
    if states is None:
        return stats
    checkpoints = states.checkpoints
    return msgspec.structs.replace(
        stats,
        state_slots=states.num_slots,
        state_slots_used=stats.running,
        state_checkpoints=checkpoints.num_rows,
        state_checkpoints_cached=len(checkpoints),
        state_bytes=states.row_bytes,
        state_saves_total=states.num_saved,
        state_restores_total=states.num_restored,
        state_rewinds_total=states.num_rewound,
        state_evictions_total=checkpoints.num_evictions,
    )
