"""Builds a request's kind of sequence group. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import Sequence
from appliance.engine.nouns.sequence_group import SequenceGroup
from appliance.engine.scheduling.beams.beam_group import BeamGroup

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.request import Request


def group_of(
    request: Request, arrival: float, bounds: Bounds, blocks: BlockManager
) -> SequenceGroup:
    """Return a new group; none of its sequences runs yet.

    `arrival`, in monotonic seconds, is unique to the group.
    """
    parent = Sequence(request, arrival=arrival)
    children = [
        Sequence(request, index=index, arrival=arrival, parent=parent)
        for index in range(1, request.sampling.num_sequences)
    ]
    members = (parent, *children)
    if request.sampling.use_beam_search:
        return BeamGroup(request, members, bounds, blocks)
    return SequenceGroup(request, members, bounds)
