"""Decides for many rows of x between a tile that widens codes in registers and dense slices.

A slice is some output features that a kernel writes in 16 bits, for the library to multiply. It
should fit the second-level cache, and its tiles should fill the multiprocessors in whole waves. The
decision is computed by a model of both, see `gpu.rates`. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from appliance.kernels.gpu.rates import (
    ISSUED,
    LANES,
    LAUNCH_CLOCKS,
    PROGRAM_CLOCKS,
    ClockRates,
    rates_of,
    side_by_side,
    waves,
)
from appliance.kernels.packed_matmul.tiled import Codes, Params, record_words
from appliance.kernels.packed_matmul.tiles import (
    ROW_STEP,
    SHORT_GROUP,
    TILE_N,
    TileDevice,
    choose_splits,
    choose_tile,
)
from appliance.kernels.packed_matmul.variant import may_fold, product_group, tiling_group

if TYPE_CHECKING:
    from appliance.kernels.gpu.residency import Multiprocessors

WIDENED_ROWS = 128  # of x, at most, for which no weight is made dense
SLICE_BYTES = 64 << 20  # of a slice, at most, and of the scratch that holds it
CACHE_SHARE = 0.5  # of the second-level cache, for a slice beside x and the result
MOST_MORE = 16  # slices that are tried beyond the fewest
# Assumed of the library, which chooses: rows of x by output features of its tiles, and into how
# many programs it divides the inputs of one.
LIBRARY_TILES = ((128, 64), (128, 128), (256, 128), (128, 256))
LIBRARY_SPLITS = (1, 2, 4)
MOST_ROWS = 4096  # of x, in a step of most settings
USUAL_RESIDENT = 2  # programs of a tile for many rows on a multiprocessor


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A linear without its numbers: with the rows of x its time follows from it.

    Attributes:
        out_features: rows of the weight.
        in_features: width of x.
        blocks_k: blocks of inputs of a kernel.
        block_k: inputs of such a block.
        nbytes: of codes and scales.
        kind: of the codes.
        params_kind: of the scale words.
        group_size: inputs that share a scale.
        gated: the result is act(gate) * up.
    """

    out_features: int
    in_features: int
    blocks_k: int
    block_k: int
    nbytes: int
    kind: Codes
    params_kind: Params
    group_size: int
    gated: bool = False

    @property
    def elements(self) -> int:
        return self.out_features * self.in_features


def best_slices(
    form: LinearForm, row_steps: int, capability: int, card: Multiprocessors
) -> tuple[int, ...]:
    """Return the heights of a weight's dense slices, see `choose_slices`, even if none pay."""
    return _best_slices(form, row_steps * ROW_STEP, capability, card)[0]


@lru_cache(maxsize=4096)
def choose_slices(
    form: LinearForm, row_steps: int, capability: int, card: Multiprocessors
) -> tuple[int, ...]:
    """Return the heights of a weight's dense slices, from the first row on.

    Args:
        form: of the linear.
        row_steps: rows of x, in steps of ROW_STEP.
        capability: compute capability (86 is 8.6).
        card: the GPU.

    Returns:
        Multiples of TILE_N; none if codes are widened in registers.
    """
    rows = row_steps * ROW_STEP
    # Also for all sizes that a start tries above: else it would not have compiled the kernels.
    sizes = {rows, *(1 << bit for bit in range((rows - 1).bit_length(), MOST_ROWS.bit_length()))}
    place = capability, card
    if any(
        _best_slices(form, size, *place)[1] >= widened_clocks(form, size, *place) for size in sizes
    ):
        return ()
    return _best_slices(form, rows, *place)[0]


def widened_clocks(form: LinearForm, rows: int, capability: int, card: Multiprocessors) -> float:
    """Return the time of a product whose codes are widened in registers."""
    rates, codes = rates_of(capability), (form.kind, form.group_size)
    tile = choose_tile(rows, capability, tiling_group(*codes), may_fold=may_fold(*codes))
    block_bytes = form.block_k * TILE_N * form.kind.bits // 8
    place = TileDevice(capability, card, USUAL_RESIDENT)
    splits = choose_splits(-(-form.out_features // TILE_N), form.blocks_k, block_bytes, tile, place)
    programs = -(-rows // tile.block_m) * -(-form.out_features // tile.block_n) * splits
    weights = tile.block_n * form.in_features / splits  # that a program widens
    issue = weights / LANES * loop_instructions(form) / ISSUED
    program = side_by_side(weights * tile.block_m / rates.products, issue)
    program += PROGRAM_CLOCKS * (1 if splits == 1 else 2)
    read = form.nbytes / (rates.memory_bytes * card.num_sms)
    return max(waves(programs, card.num_sms) * program, read) + LAUNCH_CLOCKS


def sliced_clocks(
    form: LinearForm, rows: int, heights: tuple[int, ...], capability: int, card: Multiprocessors
) -> float:
    """Return the time of a product by dense slices of some heights."""
    rates = rates_of(capability)
    total = sum(
        heights.count(height) * _slice_clocks(form, rows, height, rates, card)
        for height in set(heights)
    )
    if form.gated:  # the result is written, and read for the activation
        moved = 4 * rows * form.out_features
        total += LAUNCH_CLOCKS + moved / (rates.memory_bytes * card.num_sms)
    return total


def _slice_clocks(
    form: LinearForm, rows: int, height: int, rates: ClockRates, card: Multiprocessors
) -> float:
    weights, memory = height * form.in_features, rates.memory_bytes * card.num_sms
    passed = 0 if 2 * weights <= CACHE_SHARE * card.l2_bytes else 2 * weights
    issue = weights * dense_instructions(form) / (ISSUED * card.num_sms)
    codes = form.nbytes / form.elements * weights
    product = library_waves(rows, height, form.in_features, rates, card)
    return max(issue, (codes + passed) / memory) + max(product, passed / memory) + 2 * LAUNCH_CLOCKS


def library_waves(
    rows: int, height: int, in_features: int, rates: ClockRates, card: Multiprocessors
) -> float:
    """Return the time of the library's product by its best tile, without the launch."""
    return min(
        waves(-(-rows // tall) * -(-height // wide) * splits, card.num_sms)
        * (tall * wide * in_features / (splits * rates.products) + splits * PROGRAM_CLOCKS)
        for tall, wide in LIBRARY_TILES
        for splits in LIBRARY_SPLITS
    )


@lru_cache(maxsize=4096)
def _best_slices(
    form: LinearForm, rows: int, capability: int, card: Multiprocessors
) -> tuple[tuple[int, ...], float]:
    """Return the slices that take the least time, and that time."""
    tiles, dense = -(-form.out_features // TILE_N), 2 * form.elements
    fewest = -(-dense // SLICE_BYTES)
    cached = int(dense / (CACHE_SHARE * card.l2_bytes)) + 1
    counts = {*range(fewest, fewest + MOST_MORE), *range(cached, cached + MOST_MORE)}
    tried = [_evenly(tiles, min(count, tiles)) for count in sorted(counts)]
    times = {heights: sliced_clocks(form, rows, heights, capability, card) for heights in tried}
    return min(times.items(), key=lambda found: found[1])


def _evenly(tiles: int, count: int) -> tuple[int, ...]:
    each, more = divmod(tiles, count)
    return (TILE_N * (each + 1),) * more + (TILE_N * each,) * (count - more)


def scratch_rows(out_features: int, in_features: int) -> int:
    """Return the rows of the scratch that every slice of a weight fits.

    The same for all rows of x, so that a start measures it with any.
    """
    tiles = -(-out_features // TILE_N)
    fewest = -(-2 * out_features * in_features // SLICE_BYTES)
    return TILE_N * -(-tiles // fewest)


def loop_instructions(form: LinearForm) -> float:
    """Return the instructions of a hot loop for many rows, per weight and lane."""
    if form.kind in _TRELLIS_INSTRUCTIONS:
        return _TRELLIS_INSTRUCTIONS[form.kind]
    if not 0 < product_group(form.kind, form.group_size) <= SHORT_GROUP:
        return 5.9
    return _SHORT_INSTRUCTIONS.get((form.kind, form.params_kind), 9.6)


_TRELLIS_INSTRUCTIONS = {
    Codes.TRELLIS2: 13.3,
    Codes.TRELLIS3: 9.8,
    Codes.TRELLIS4: 10.7,
    Codes.TRELLIS5: 12.4,
}
_SHORT_INSTRUCTIONS = {
    (Codes.INT2, Params.Q2_K): 8.1,
    (Codes.INT3, Params.Q3_K): 8.1,
    (Codes.INT5, Params.Q5_0): 6.6,
    (Codes.INT5, Params.Q5_1): 6.9,
    (Codes.INT4, Params.Q4_K): 6.9,
    (Codes.INT5, Params.Q4_K): 8.2,
    (Codes.INT6, Params.Q6_K): 7.8,
    (Codes.IQ2, Params.ODD_32): 10.7,
    (Codes.IQ2, Params.ODD_16): 11.4,
    (Codes.IQ1, Params.ODD_32): 10.7,
    (Codes.IQ1, Params.ODD_16): 11.4,
    (Codes.INT8, Params.FP32): 7.4,
    (Codes.INT4, Params.FP16_OFFSET): 5.6,
    (Codes.INT4, Params.FP16_ZERO): 5.6,
    (Codes.INT4, Params.FP32): 5.6,
}


def dense_instructions(form: LinearForm) -> float:
    """Return the instructions of all warps that make a weight dense, per weight."""
    if form.kind.is_trellis:
        return 0.5
    if record_words(form.params_kind, form.block_k) == 0:
        return 0.28
    return 1.06 if form.group_size < SHORT_GROUP else 0.8
