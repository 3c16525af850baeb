"""Tiles of the int8 matmul, and the model that says where it is faster than 16 bits.

Computed like `packed_matmul.slices`; nothing was timed on a GPU. Imports no triton.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from appliance.kernels.gpu.rates import (
    ISSUED,
    LANES,
    LAUNCH_CLOCKS,
    PROGRAM_CLOCKS,
    rates_of,
    side_by_side,
    waves,
)
from appliance.kernels.int8_matmul.variant import multiplies
from appliance.kernels.packed_matmul.slices import (
    USUAL_RESIDENT,
    WIDENED_ROWS,
    best_slices,
    sliced_clocks,
    widened_clocks,
)
from appliance.kernels.packed_matmul.tiled import Params
from appliance.kernels.packed_matmul.tiles import (
    ROW_STEP,
    TILE_N,
    MatmulTile,
    TileDevice,
    choose_splits,
)

if TYPE_CHECKING:
    from appliance.kernels.gpu.residency import Multiprocessors
    from appliance.kernels.packed_matmul.slices import LinearForm

LEAST_ROWS = 64  # of prompts; with fewer a weight is read at the speed of memory
# GeForce's tensor cores multiply int8 at four times the rate of 16 bits added in float32. Without
# the cap, ptxas saves registers at the cost of spills.
TILE = MatmulTile(512, 64, 128, 8, 3, tilewise=True, max_registers=208)
ENTRIES = (64, 128, 256, 512)  # rows, of which each has splits of its own
PROVEN = (86, 89, 120)  # compute capabilities that it is compiled and executed for


def int8_tile(rows: int) -> MatmulTile:
    """Return the tile for a number of rows of x."""
    most = next((most for most in ENTRIES if rows <= most), -(-rows // ROW_STEP) * ROW_STEP)
    return replace(TILE, max_rows=most)


def entry_of(rows: int) -> int:
    """Return the most rows of the entry for which a timed choice holds; the last one has no end."""
    return min(int8_tile(rows).max_rows, ENTRIES[-1])


def has_fast_int8(capability: int) -> bool:
    """Return True if tensor cores multiply int8 at four times the rate of 16 bits."""
    rates = rates_of(capability)
    is_proven = any(known <= capability < known // 10 * 10 + 10 for known in PROVEN)
    return is_proven and rates.byte_products >= 4 * rates.products


@lru_cache(maxsize=4096)
def is_faster(form: LinearForm, row_steps: int, capability: int, card: Multiprocessors) -> bool:
    """Return True if a linear's product is computed to be faster in int8.

    Args:
        form: of the linear.
        row_steps: rows of x, in steps of ROW_STEP.
        capability: compute capability (86 is 8.6).
        card: the GPU.
    """
    rows = row_steps * ROW_STEP
    if rows < LEAST_ROWS or not multiplies(form) or not has_fast_int8(capability):
        return False
    usual = usual_clocks(form, row_steps, capability, card)
    return int8_clocks(form, rows, capability, card) < usual


def usual_clocks(form: LinearForm, row_steps: int, capability: int, card: Multiprocessors) -> float:
    """Return the time of a product in 16 bits, by widened codes or dense slices."""
    rows = row_steps * ROW_STEP
    widened = widened_clocks(form, rows, capability, card)
    if rows <= WIDENED_ROWS:
        return widened
    heights = best_slices(form, row_steps, capability, card)
    return min(widened, sliced_clocks(form, rows, heights, capability, card))


def int8_clocks(form: LinearForm, rows: int, capability: int, card: Multiprocessors) -> float:
    """Return the time of a product in int8, with that of rounding x."""
    rates, tile = rates_of(capability), int8_tile(rows)
    tiles_n, block_bytes = -(-form.out_features // TILE_N), form.block_k * TILE_N // 2
    place = TileDevice(capability, card, USUAL_RESIDENT)
    splits = choose_splits(tiles_n, form.blocks_k, block_bytes, tile, place)
    programs = -(-rows // tile.block_m) * -(-form.out_features // tile.block_n) * splits
    weights = tile.block_n * form.in_features / splits  # of a program
    issue = weights / LANES * loop_instructions(form) / ISSUED
    program = side_by_side(weights * tile.block_m / rates.byte_products, issue)
    program += PROGRAM_CLOCKS * (1 if splits == 1 else 2)
    memory = rates.memory_bytes * card.num_sms
    product = max(waves(programs, card.num_sms) * program, form.nbytes / memory)
    rounded = 3 * rows * form.in_features / memory  # x is read and its codes are written
    return product + rounded + 2 * LAUNCH_CLOCKS


def loop_instructions(form: LinearForm) -> float:
    """Return the instructions of the hot loop per weight and lane, as compiled for 8.6."""
    found = _INSTRUCTIONS.get((form.params_kind, form.group_size))
    return found or _INSTRUCTIONS[Params.FP16_OFFSET, form.group_size]


_INSTRUCTIONS = {
    (Params.FP32, 128): 4.7,
    (Params.FP32, 64): 6.5,
    (Params.FP32, 32): 10.5,
    (Params.FP16_OFFSET, 128): 5.5,
    (Params.FP16_OFFSET, 64): 8.2,
    (Params.FP16_OFFSET, 32): 13.8,
    (Params.Q4_K, 32): 14.3,
}
