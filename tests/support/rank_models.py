"""Models of real sizes as specs alone, which no machine of a test could hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation
from appliance.kernels.routing import Router
from appliance.model.shard.column_units import COLUMN_UNIT, USUAL_GROUP, ColumnUnits
from appliance.model.shard.shard import Shard, shard_model
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)

if TYPE_CHECKING:
    from appliance.model.shard.split import Split

_NORM, _ROPE = NormSpec(1e-6), RopeSpec(1e4, 128)


def _decoder(
    hidden: int, layers: int, heads: tuple[int, int], mlp: MLPSpec | ExpertsSpec
) -> DecoderSpec:
    attention = AttentionSpec(*heads, 128, 1.0, _ROPE)
    layer = LayerSpec(attention, mlp, _NORM)
    return DecoderSpec("test", hidden, 128_256, 131_072, (layer,) * layers, _NORM, tied_head=False)


DENSE = _decoder(4096, 32, (32, 8), MLPSpec(14_336, Activation.SILU))
MODELS = {
    "8B": DENSE,
    "1B, tied": replace(
        _decoder(2048, 16, (16, 8), MLPSpec(8192, Activation.SILU)), tied_head=True
    ),
    "70B": _decoder(8192, 80, (64, 8), MLPSpec(28_672, Activation.SILU)),
    "experts": _decoder(2048, 48, (32, 4), ExpertsSpec(768, Activation.SILU, Router(128, 8))),
}


def shards_of(spec: DecoderSpec, split: Split) -> tuple[Shard, ...]:
    """Divide a model whose weights are packed in groups of 128."""
    mlps = ((index, layer.mlp) for index, layer in enumerate(spec.layers))
    at = [(index, mlp.intermediate_size) for index, mlp in mlps if mlp is not None]
    units = ColumnUnits(dict.fromkeys(at, USUAL_GROUP), dict.fromkeys(at, COLUMN_UNIT))
    return shard_model(spec, split, units)
