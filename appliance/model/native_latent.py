"""Lays out latent attention for the CPU library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.cpu.structs import AttentionStruct, LatentStruct, LinearStruct, NormStruct

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.structs import LayerStruct
    from appliance.kernels.cpu.weights import WeightPacker
    from appliance.model.layer_weights import LatentWeights
    from appliance.model.spec import LatentAttentionSpec


def lay_out_latent(
    packer: WeightPacker,
    struct: LayerStruct,
    weights: LatentWeights,
    spec: LatentAttentionSpec,
    rope: int,
) -> None:
    """Lay out latent attention with RoPE number `rope` into its layer's struct."""
    norm, up = weights.query_norm, weights.queries
    struct.attention = AttentionStruct(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        rope=rope,
        num_qkv=len(weights.inputs),
        qkv=(LinearStruct * 4)(*(packer.linear(part.weight, part.bias) for part in weights.inputs)),
        output=packer.linear(weights.output.weight, weights.output.bias),
    )
    latent = LatentStruct(
        latent=spec.latent,
        plain_dim=spec.plain_dim,
        value_dim=spec.value_dim,
        query_norm=NormStruct() if norm is None else packer.norm(norm.weight, norm.eps),
        queries=LinearStruct() if up is None else packer.linear(up.weight, up.bias),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        keys=_heads(packer, weights.keys.mT),
        values=_heads(packer, weights.values),
    )
    struct.latent = packer.structs(LatentStruct, [latent])


def _heads(packer: WeightPacker, weights: Tensor) -> int:
    """Lay out a linear per head, (num_heads, out_features, in_features)."""
    return packer.structs(LinearStruct, [packer.linear(head.contiguous()) for head in weights])
