"""Counts the memory that a tower needs beside its weights, before they are read.

The C library claims its part for a step at once (kernels/cpu/src/step_state.h) and keeps it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from appliance.model.spec import AttentionSpec, MLPSpec
from appliance.model.vision.projector import CELLS_AT_ONCE

if TYPE_CHECKING:
    from appliance.model.vision.spec import TowerSpec

_PATCHES_AT_ONCE = 4096  # of tiles, which the tower takes side by side
_THREAD_BYTES = 150 << 10  # of attention's queries and scores
_INDEX_BYTES = 52  # of a patch: its places in picture, step and cache
_JOINED_FLOATS = 7  # of an input of the projector, for what its activation makes on the way


class RowForm(Enum):
    """Forms in which the library multiplies rows, by the bytes of an input."""

    PLAIN = 0
    SPLIT = 4  # for 16-bit weights in tiles: two parts in 16 bits
    CODES = 2.5  # a code, and a scale of 16 inputs


def tiles_at_once(patches: int) -> int:
    """Return how many tiles of a number of patches a tower takes side by side."""
    return max(1, _PATCHES_AT_ONCE // patches)


def workspace_bytes(
    spec: TowerSpec, tiles: int, cells: int, width: int, threads: int, form: RowForm
) -> int:
    """Count the bytes that the largest canvas needs in the C library and around it.

    Args:
        tiles: of the canvas.
        cells: of each tile.
        width: of the decoder's rows.
        form: of the rows that the layers' weights multiply.
    """
    patches = cells * spec.merge**2
    count = min(tiles, tiles_at_once(patches)) * patches
    of_step = count * (_library_bytes(spec, form) + _INDEX_BYTES)
    copies = 1 if spec.windows is None else 2  # in the order of windows
    pixels = copies * tiles * patches * spec.patch.inputs
    rows = tiles * cells * width * (1 + len(spec.taps))
    around = pixels + rows + _around(spec, count, patches, cells)
    return int(of_step + 4 * around + threads * _THREAD_BYTES)


def _around(spec: TowerSpec, count: int, patches: int, cells: int) -> int:
    """Count the floats before, in and behind the layers, whichever are the most.

    Args:
        count: of patches that the layers take.
        patches: of a tile.
        cells: of a tile.
    """
    width, taps = spec.layers.hidden_size, len(spec.taps)
    inputs = width if spec.projector.averages else spec.merge**2 * width
    joined = min(cells, CELLS_AT_ONCE) * inputs * _JOINED_FLOATS
    is_added_to = spec.table is not None or spec.first_norm is not None
    before = (count + (1 + is_added_to) * patches) * width
    within = (2 + taps) * count * width
    return max(before, within, (1 + taps) * count * width + joined)


def _library_bytes(spec: TowerSpec, form: RowForm) -> float:
    """Bytes of a patch in the library: buffers of a step, keys and values, rows of linears."""
    layers = spec.layers
    if not layers.layers:
        return 0.0
    layer = layers.layers[0]
    mixer, mlp = layer.mixer, layer.mlp
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    width, inner = layers.hidden_size, mlp.intermediate_size
    heads = mixer.num_heads * mixer.head_dim
    streams = 3 if layer.post_norms else 2
    floats = streams * width + 4 * heads + 2 * inner + mixer.rope.rotary_dim + 2 * heads
    return 4 * floats + float(form.value) * max(width, heads, inner)
