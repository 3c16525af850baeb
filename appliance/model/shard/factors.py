"""Cuts a rank's part out of the linears that adapters change; the ranks' products add up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.shard.mixer_ranges import input_ranges, output_columns
from appliance.model.shard.weights import middle_ranges
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.adapters.targets import AdapterTarget, TargetRows
    from appliance.model.shard.shard import Shard
    from appliance.model.shard.split import Columns


def own_targets(targets: Mapping[str, AdapterTarget], shard: Shard) -> dict[str, AdapterTarget]:
    """Return a rank's part of each linear: of its outputs, or of its inputs."""
    return {name: _own(target, shard) for name, target in targets.items()}


def _own(target: AdapterTarget, shard: Shard) -> AdapterTarget:
    is_mixer = target.place in (AdapterPlace.INTO_MIXER, AdapterPlace.OUT_OF_MIXER)
    own = _of_mixer(shard, target.layer) if is_mixer else _of_mlp(shard, target.layer)
    if own is None:
        return target
    ranges, columns = own
    if target.place in (AdapterPlace.INTO_MIXER, AdapterPlace.INTO_MLP):
        return replace(target, pieces=_cut_outputs(target.pieces, ranges))
    return replace(target, columns=columns)


def _of_mixer(shard: Shard, index: int) -> tuple[list[Columns], Columns] | None:
    """Return a rank's outputs of the first linears, and inputs of the last one."""
    heads, mixer = shard.layers[index].heads, shard.whole.layers[index].mixer
    if heads is None or mixer is None:
        return None
    return input_ranges(mixer, heads), output_columns(mixer, heads)


def _of_mlp(shard: Shard, index: int) -> tuple[list[Columns], Columns] | None:
    share, mlp = shard.layers[index], shard.whole.layers[index].mlp
    if isinstance(mlp, ExpertsSpec):  # adapters change the shared MLP
        mlp, columns = mlp.shared, share.shared
    else:
        columns = share.columns
    if columns is None or mlp is None:
        return None
    width = mlp.intermediate_size
    return middle_ranges(width, width * (1 + mlp.gated), columns), columns


def _cut_outputs(pieces: tuple[TargetRows, ...], ranges: list[Columns]) -> tuple[TargetRows, ...]:
    """Return the rows in ranges of a place's outputs, made adjacent."""
    found, begin = [], 0
    for first, last in ranges:
        for piece in pieces:
            low = max(first, piece.first_output)
            high = min(last, piece.first_output + piece.count)
            if low < high:
                found.append(piece.part(low, high, begin + low - first))
        begin += last - first
    return tuple(found)
