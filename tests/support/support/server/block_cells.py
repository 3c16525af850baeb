"""Encodes a block of the feed as a 32-bit word (`events.Snapshot.cells`), and decodes it."""

from __future__ import annotations

from appliance.events import BlockState

MAX_SHOWN_REFERENCES = 0xFF


def pack_cell(state: int, precision: int, references: int, owner: int) -> int:
    """Encode one block."""
    return state | precision << 4 | min(references, MAX_SHOWN_REFERENCES) << 8 | owner << 16


def unpack_cell(cell: int) -> tuple[BlockState, int, int, int]:
    """Decode a word into state, precision index, reference count and owner slot."""
    return BlockState(cell & 0xF), cell >> 4 & 0xF, cell >> 8 & 0xFF, cell >> 16
