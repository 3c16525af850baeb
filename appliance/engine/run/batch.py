"""Writes a plan into the staging buffer as the device's input arrays."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.nouns.plan import sampling_rows
from appliance.engine.run.staging import StepShape
from appliance.kernels.attention.work import NO_TILE, prefill_tiles
from appliance.kernels.rows.host_spans import HostSpans

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray

    from appliance.engine.nouns.plan import Plan, ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.geometry import Geometry
    from appliance.engine.run.sampler import Sampler
    from appliance.engine.run.slot_settings import StepSettings
    from appliance.engine.run.staging import Staging


def is_decode(plan: Plan) -> bool:
    """Return True if every sequence has one row and samples."""
    return all(entry.num_tokens == 1 and entry.samples for entry in plan.scheduled)


def shape_of(scheduled: Sequences[ScheduledSequence], geometry: Geometry) -> StepShape:
    """Return the step's sizes; padding rows have sampling settings too."""
    size = geometry.size
    return StepShape(
        num_tokens=geometry.num_rows,
        num_seqs=len(geometry.query_lens),
        num_samples=sum([1 + len(entry.drafts) for entry in scheduled if entry.samples])
        if size is None
        else size.num_samples,
        table_width=max(map(len, geometry.block_tables)),
        is_sealed=geometry.open_blocks is not None,
        is_recurrent=geometry.state_slots is not None,
        is_adapted=geometry.adapter_slots is not None,
        num_tiles=geometry.num_tiles,
        num_spans=geometry.num_spans,
        num_chunks=geometry.num_chunks,
        has_axes=geometry.has_axes,
    )


def stage(
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    staging: Staging,
    sampler: Sampler,
    places: Mapping[Sequence, int],
) -> tuple[StepShape, StepSettings]:
    """Write a step into the staging buffer.

    Args:
        places: where the previous step put the token of each sequence that follows it.

    Returns:
        The step's sizes, and the settings of each sampling row.
    """
    shape = shape_of(scheduled, geometry)
    arrays = staging.arrays(shape)
    _fill(arrays, scheduled, geometry, places, staging.first_source)
    return shape, sampler.stage(sampling_rows(scheduled), arrays)


def _fill(
    arrays: Mapping[str, NDArray[Any]],
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    places: Mapping[Sequence, int],
    first_source: int | None,
) -> None:
    """Write everything but sampling settings; `first_source` is the first row's, if any."""
    num_tokens, padding = len(arrays["token_ids"]), geometry.padding
    token_ids: list[int] = []
    sample_rows: list[int] = []
    if first_source is not None:
        np.add(counting(num_tokens), first_source, out=arrays["sources"])
    following: list[int] = []
    sources: list[int] = []
    with_pictures: list[tuple[int, ScheduledSequence]] = []  # and their first rows
    for entry in scheduled:
        sequence, start, rows, samples, follows, _, drafts = entry
        if sequence.request.pictures is not None:
            with_pictures.append((len(token_ids) + padding * (rows > 1), entry))
        if follows:
            following.append(len(token_ids))
            sources.append(places[sequence])
            token_ids.append(0)
        elif rows == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += [0] * padding  # after the single rows
            padding = 0
            token_ids += sequence.token_ids[start : start + rows - len(drafts)]
            token_ids += drafts
        if samples:
            sample_rows += range(len(token_ids) - 1 - len(drafts), len(token_ids))
    if following:
        arrays["sources"][following] = sources
    num_filled = len(token_ids)
    # The rows of pictures have no token.
    tokens = np.maximum(token_ids, 0) if with_pictures else token_ids
    arrays["token_ids"][:num_filled] = tokens
    count = len(sample_rows)
    arrays["sample_rows"][:count] = sample_rows
    if geometry.size is not None:
        arrays["token_ids"][num_filled:] = 0
        arrays["sample_rows"][count:] = 0
    _fill_places(arrays, geometry)
    if geometry.has_axes:
        _fill_axes(arrays, with_pictures)
    if geometry.num_spans:
        assert geometry.state_slots is not None
        assert geometry.spare is not None
        assert geometry.spare.state_slot is not None
        spans = HostSpans.of(geometry.state_slots, geometry.query_lens, geometry.context_lens)
        room = geometry.num_spans, geometry.num_chunks
        for name, values in spans.padded(*room, geometry.spare.state_slot).items():
            arrays[name][:] = values
    if geometry.num_tiles:
        tiles = prefill_tiles(geometry.query_lens, geometry.num_decodes)
        arrays["tiles"].reshape(-1, 2)[:] = NO_TILE
        arrays["tiles"][: tiles.size] = tiles.reshape(-1)


def _fill_places(arrays: Mapping[str, NDArray[Any]], geometry: Geometry) -> None:
    """Write positions and slots; each padding row has its own slot in the spare block."""
    size, num_tokens = geometry.block_size, geometry.num_rows
    contexts = np.array(geometry.context_lens)
    num_seqs = len(contexts)
    arrays["context_lens"][:] = contexts
    tables = arrays["block_tables"].reshape(num_seqs, -1)
    _fill_tables(tables, geometry.block_tables)
    owners, positions = counting(num_seqs), arrays["positions"]
    if num_seqs == num_tokens:
        arrays["query_start"][:] = counting(num_seqs + 1)
        np.subtract(contexts, 1, out=positions)
    else:
        rows = np.array(geometry.query_lens)
        ends = rows.cumsum()
        arrays["query_start"][0] = 0
        arrays["query_start"][1:] = ends
        owners = np.repeat(owners, rows)
        used = len(owners)
        np.add(counting(used), (contexts - ends)[owners], out=positions[:used])
        positions[used:] = 0
    used = len(owners)
    blocks, offsets = np.divmod(positions, size)
    if geometry.padding:
        end = geometry.num_decodes
        offsets[end - geometry.padding : end] = counting(geometry.padding) % size
    if used < num_tokens:
        offsets[used:] = counting(num_tokens - used) % size
    slots = arrays["slot_mapping"]
    slots[:used] = tables[owners, blocks[:used]]
    if geometry.spare is not None:
        slots[used:] = geometry.spare.block
    slots *= size
    slots += offsets
    if geometry.state_slots is not None:
        arrays["state_slots"][:] = geometry.state_slots
    if geometry.adapter_slots is not None:
        arrays["adapter_slots"][:] = geometry.adapter_slots
    if geometry.open_blocks is None:
        return
    opened = np.array(geometry.open_blocks)
    lasts = np.maximum(contexts - 1, 0)
    arrays["sealed_lens"][:] = lasts // size * size
    arrays["open_tables"][:] = opened
    open_slots = arrays["open_slots"]
    open_slots[:used] = opened[owners]
    if geometry.spare is not None:
        open_slots[used:] = geometry.spare.open_block
    open_slots *= size
    open_slots += offsets
    # The blocks that the step fills.
    last = tables[counting(num_seqs), lasts // size]
    moves = np.stack((opened, last), axis=1)
    moves[(contexts % size > 0) | (contexts == 0)] = -1
    arrays["moves"].reshape(-1, 2)[:] = moves


def _fill_axes(
    arrays: Mapping[str, NDArray[Any]], with_pictures: list[tuple[int, ScheduledSequence]]
) -> None:
    """Write the positions that rows rotate by: other than their places behind a picture's start."""
    axes = arrays["axes"].reshape(3, -1)
    axes[:] = arrays["positions"]
    for row, entry in with_pictures:
        assert entry.sequence.axes is not None
        axes[:, row : row + entry.num_tokens] = entry.sequence.axes(entry.start, entry.end)


def _fill_tables(tables: NDArray[Any], block_tables: Sequences[array[int]]) -> None:
    """Write block tables (num_seqs, table_width), padded with zeros."""
    found = np.frombuffer(b"".join(block_tables), dtype=np.int32)
    if len(found) == tables.size:
        tables.reshape(-1)[:] = found
        return
    lengths = np.array([len(table) for table in block_tables])
    tables[:] = 0
    present = counting(tables.shape[1]) < lengths[:, None]
    tables[present] = found


def counting(count: int) -> NDArray[np.int64]:
    """Return (count,) 0, 1, 2, ...; shared, so do not write to it."""
    return _counting(1 << count.bit_length())[:count]


@lru_cache
def _counting(count: int) -> NDArray[np.int64]:
    return np.arange(count)
