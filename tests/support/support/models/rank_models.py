"""Models of real sizes as specs without weights, which no test machine could hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation
from appliance.kernels.routing import Router
from appliance.model.recurrent_spec import Mamba2Spec
from appliance.model.shard.shard import COLUMN_UNIT, USUAL_GROUP, ColumnUnits, Shard, shard_model
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
    hidden: int, layers: int, mixer: tuple[int, int] | Mamba2Spec, mlp: MLPSpec | ExpertsSpec
) -> DecoderSpec:
    """Describe equal layers; `mixer` as a pair gives attention's heads and groups."""
    attention = AttentionSpec(*mixer, 128, 1.0, _ROPE) if isinstance(mixer, tuple) else mixer
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
    # Each of these needs one more exchange in a layer: before the norm of a group that ranks share,
    # and before the norm of the MLP beside the experts.
    "Mamba-2 of one group": _decoder(
        4096, 40, Mamba2Spec(128, 1, 64, 128, 4, _NORM), MLPSpec(12_288, Activation.SILU)
    ),
    "norms beside experts": _decoder(
        2816,
        30,
        (16, 8),
        ExpertsSpec(
            768, Activation.GELU_TANH, Router(128, 8),
            shared=MLPSpec(2304, Activation.GELU_TANH),
            own_norms=True,
        ),
    ),
}  # fmt: skip


def shards_of(spec: DecoderSpec, split: Split) -> tuple[Shard, ...]:
    """Divide a model whose weights are packed in groups of 128."""
    mlps = [(index, layer.mlp) for index, layer in enumerate(spec.layers)]
    mlps += [(i, mlp.shared) for i, mlp in mlps if isinstance(mlp, ExpertsSpec)]
    at = [(index, mlp.intermediate_size) for index, mlp in mlps if mlp is not None]
    units = ColumnUnits(dict.fromkeys(at, USUAL_GROUP), dict.fromkeys(at, COLUMN_UNIT))
    return shard_model(spec, split, units)
