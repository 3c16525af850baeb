"""Adds adapters in torch, slot by slot, with sums in float32. See LoRA, arXiv 2106.09685."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.adapters.factors import StackedFactors

    # Slots, and the rows (n,) int64 of a step that each of them has.
    AdapterWork: TypeAlias = list[tuple[int, Tensor]]


def plan_adapters(row_slots: Tensor, num_slots: int) -> AdapterWork:
    """Group the rows of a step by slot, once for all layers.

    Args:
        row_slots: (num_tokens,) int32, below 0 without an adapter.
        num_slots: of the table.
    """
    slots = row_slots.unique().tolist()
    assert all(slot < num_slots for slot in slots), (slots, num_slots)
    return [(slot, torch.where(row_slots == slot)[0]) for slot in slots if slot >= 0]


def add_adapters(out: Tensor, x: Tensor, factors: StackedFactors, work: AdapterWork) -> None:
    """Add to the outputs of a place, in place; rows without an adapter keep their bits.

    Args:
        out: (num_tokens, outputs), what the place's linears yield.
        x: (num_tokens, in_features), their input.
        work: what `plan_adapters` returned for these rows.
    """
    for slot, rows in work:
        ranks = factors.ranks[slot].tolist()
        for piece in factors.pieces:
            rank = ranks[piece.part]
            if not rank:
                continue
            shrink = factors.shrink[slot, piece.part, :rank].float()
            last = piece.first_row + piece.num_rows
            expand = factors.expand[slot, piece.first_row : last, :rank].float()
            shrunk = x[rows].float() @ shrink.T * factors.scales[slot, piece.part]
            outputs = slice(piece.first_output, piece.first_output + piece.num_rows)
            out[rows, outputs] = (out[rows, outputs].float() + shrunk @ expand.T).to(out.dtype)
