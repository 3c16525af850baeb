"""Divides a linear's inputs by scales, in the norm or linear that produces them.

The pairs follow from the order of a decoder layer, not from a list of architectures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.quant.methods import awq

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.model.norm import Norm
    from appliance.quant.formats.scheme import GroupedScheme
    from appliance.quant.walk.block import Moments, TransformerBlock


def scale_inputs(
    block: TransformerBlock,
    moments: list[Moments],
    schemes: list[GroupedScheme | None],
    dtype: torch.dtype,
    norm_offset: float,
) -> list[awq.InputScales]:
    """Choose scales for the inputs of a layer's four linears and fold them in.

    Args:
        block: changed in place; its outputs stay the same.
        moments: of its linears' inputs, in their order.
        schemes: of its linears; None leaves a linear's inputs alone.
        dtype: of stored scales and norms.
        norm_offset: what the model adds to a norm's stored weight.

    Returns:
        The folded scales of the linears with a scheme, in their order.
    """
    attention = block.attention.spec
    queries = attention.num_heads // attention.num_kv_heads
    first_value = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    values = slice(first_value, block.qkv.out_features)
    ups = slice(block.gate_up.out_features // 2, block.gate_up.out_features)

    def into_values(scales: Tensor) -> Tensor:
        heads = scales.view(attention.num_kv_heads, queries, attention.head_dim)
        block.qkv.scale_outputs(values, heads[:, 0].reshape(-1))
        return scales

    def into_ups(scales: Tensor) -> Tensor:
        block.gate_up.scale_outputs(ups, scales)
        return scales

    def into_norm(norm: Norm) -> Callable[[Tensor], Tensor]:
        return lambda scales: _scale_norm(norm, scales, dtype, norm_offset)

    places: list[tuple[Callable[[Tensor], Tensor], int | None]] = [
        (into_norm(block.mixer_norm), None),
        (into_values, attention.num_kv_heads),
        (into_norm(block.mlp_norm), None),
        (into_ups, None),
    ]
    found = []
    for linear, seen, scheme, (fold, heads) in zip(
        block.linears(), moments, schemes, places, strict=True
    ):
        if scheme is None:
            continue
        chosen = awq.choose_scales(
            [linear.weight],
            seen.hessian,
            seen.magnitude,
            scheme,
            dtype,
            sources=heads,
            head_dim=attention.head_dim,
        )
        exact = fold(chosen.scales)
        linear.scale_inputs(exact)
        found.append(replace(chosen, scales=exact))
    return found


def _scale_norm(norm: Norm, scales: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    """Divide a norm's weight by scales and round it to its stored type.

    Returns:
        The scales that the rounded weight represents exactly.
    """
    stored = (norm.weight / scales - offset).to(dtype).float() + offset
    usable = (stored != 0) & (norm.weight != 0)
    exact = torch.where(usable, norm.weight / stored, torch.ones_like(scales))
    norm.weight.copy_(torch.where(usable, stored, norm.weight))
    return exact
