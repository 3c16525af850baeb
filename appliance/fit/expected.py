"""Expects how fast a GPU answers one stream: from bytes, bandwidth and the launches of a step.

Launches are counted, not assumed: `tests/model/test_launches.py` compares them with what models of
each kind launch. The two constants are assumptions; nothing here was measured on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec, MLPSpec

if TYPE_CHECKING:
    from appliance.engine.memory.experts.prediction import TokenTime
    from appliance.model.spec import DecoderSpec, LayerSpec, MixerSpec

# Assumed of a graph's kernel: from the end of the one before until its programs read at full rate.
KERNEL_SECONDS = 2e-6
READ_SHARE = 0.9  # of the maker's bandwidth: assumed of long reads
# Nine before the first layer (tokens, embedding, angles, the first norm, spans), head and its
# conversion, and five that choose the token.
STEP_KERNELS = 16


def expected_rate(time: TokenTime, spec: DecoderSpec) -> float:
    """Return the tokens/s of one stream that are expected of our kernels on a GPU.

    Args:
        time: of a token, if the device read at the maker's bandwidth and did nothing else.
        spec: of the model.
    """
    started = launches(spec) * KERNEL_SECONDS
    return 1 / (time.device / READ_SHARE + time.host + time.crossings + started)


def launches(spec: DecoderSpec) -> int:
    """Return the kernels that a step of one stream launches, its sampling included."""
    return STEP_KERNELS + sum(map(layer_launches, spec.layers))


def layer_launches(layer: LayerSpec) -> int:
    """Return the kernels that a layer launches for one row, without adapters.

    A norm is one with the addition before it. Plans of attention are the step's.
    """
    norms = (layer.mixer is not None) + (layer.mlp is not None and not layer.one_norm)
    return norms + _of_mixer(layer.mixer) + _of_mlp(layer.mlp)


def _of_mixer(mixer: MixerSpec | None) -> int:
    match mixer:
        case None:
            return 0
        case AttentionSpec():  # two linears, what writes the cache, and what reads it
            return 4 + (mixer.output_gate or mixer.head_gates)
        case LatentAttentionSpec():  # queries and values are mapped around the attention
            return 6 + (mixer.query_rank is not None)
        case GatedDeltaSpec() | Mamba2Spec():  # two linears, convolution, rule and norm
            return 5
        case ShortConvSpec():
            return 3


def _of_mlp(mlp: MLPSpec | ExpertsSpec | None) -> int:
    match mlp:
        case None:
            return 0
        case MLPSpec():  # the linear of gate and up applies the activation itself
            return 2 if mlp.gated else 3
        case ExpertsSpec():  # the router, two linears of all chosen experts, their sum
            return 4 + (not mlp.gated) + _of_shared(mlp)


def _of_shared(experts: ExpertsSpec) -> int:
    """Return the launches of an MLP that all rows pass through, if it is none of the experts."""
    own = experts.shared
    if own is None:
        return 0
    is_like = (own.activation, own.gated, own.bias) == (
        experts.activation, experts.gated, experts.bias,
    )  # fmt: skip
    apart = experts.own_norms or experts.latent is not None or experts.held is not None
    if is_like and not apart and own.intermediate_size % experts.intermediate_size == 0:
        return 0
    return _of_mlp(own)
