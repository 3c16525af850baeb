"""Lays out MLPs and experts for the CPU library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.cpu.structs import (
    ExpertsStruct,
    GatingStruct,
    LinearStruct,
    RouterStruct,
    ScoringCode,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.routing import Scoring

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.activation import Gating
    from appliance.model.layer_weights import ExpertsWeights, MLPWeights
    from appliance.model.linear import LinearPart
    from appliance.model.spec import ExpertsSpec

ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.RELU_SQUARED: 3,
    Activation.RELU: 4,
    Activation.GELU: 5,
}
_CLAMPED_SWIGLU, _BOUNDED_SWIGLU = 2, 6
_SCORINGS = {scoring: ScoringCode[scoring.name] for scoring in Scoring}


def lay_out_mlp(
    packer: WeightPacker, weights: MLPWeights, *, gated: bool
) -> tuple[LinearStruct, LinearStruct, LinearStruct]:
    """Lay out gate, up and down; without a gate, up, an empty linear and down."""
    down = packer.linear(weights.down.weight, weights.down.bias)
    if not gated:
        (up,) = weights.gate_up
        return packer.linear(up.weight, up.bias), LinearStruct(), down
    gate, up = _gate_and_up(weights.gate_up)
    return packer.linear(gate.weight, gate.bias), packer.linear(up.weight, up.bias), down


def lay_out_experts(packer: WeightPacker, weights: ExpertsWeights, spec: ExpertsSpec) -> int:
    """Lay out the experts that are here, one at a time, and their router.

    Returns:
        Address of their struct in the arena.
    """
    router = spec.router
    gate, up, down = lay_out_each(packer, weights.expert, spec)
    # Routers make choices, so their weights are never rounded.
    exact = WeightPacker(packer.engine, packer.arena, "float32")
    bias, scale, norms = weights.selection_bias, weights.expert_scale, weights.norms
    struct = ExpertsStruct(
        router=RouterStruct(
            num_experts=router.num_experts,
            top_k=router.top_k,
            scoring=_SCORINGS[router.scoring],
            renormalize=router.renormalize,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            best_of_group=router.best_of_group,
            scale=router.scale,
            epsilon=router.epsilon,
            selection_bias=None if bias is None else packer.floats(bias),
            expert_scale=None if scale is None else packer.floats(scale),
        ),
        logits=exact.linear(weights.router, weights.router_bias),
        shared_gate=LinearStruct()
        if weights.shared_gate is None
        else exact.linear(weights.shared_gate),
        first_expert=spec.experts.start,
        num_here=len(spec.experts),
        weighs_inputs=spec.weighs_inputs,
        gate=gate,
        up=up,
        down=down,
    )
    if weights.latent is not None:
        into, out_of = weights.latent
        struct.into_latent = packer.linear(into.weight, into.bias)
        struct.out_of_latent = packer.linear(out_of.weight, out_of.bias)
    if norms is not None:
        for name in ("router", "input", "shared", "output"):
            norm = getattr(norms, name)
            setattr(struct, f"{name}_norm", packer.norm(norm.weight, norm.eps))
    return packer.structs(ExpertsStruct, [struct])


def lay_out_each(
    packer: WeightPacker, expert: Callable[[int], MLPWeights], spec: ExpertsSpec
) -> tuple[int, int | None, int]:
    """Lay out the experts that are here, one at a time.

    Returns:
        Addresses of the structs of gates, ups and downs, as from `lay_out_mlp`.
    """
    linears = [lay_out_mlp(packer, expert(number), gated=spec.gated) for number in spec.experts]
    gates, ups, downs = zip(*linears, strict=True)
    return (
        packer.structs(LinearStruct, gates),
        packer.structs(LinearStruct, ups) if spec.gated else None,
        packer.structs(LinearStruct, downs),
    )


def gating_struct(gating: Gating) -> GatingStruct:
    if isinstance(gating, ClampedSwiGLU):
        return GatingStruct(_CLAMPED_SWIGLU, gating.limit, gating.alpha)
    if isinstance(gating, BoundedSwiGLU):
        return GatingStruct(_BOUNDED_SWIGLU, gating.limit)
    return GatingStruct(ACTIVATIONS[gating])


def _gate_and_up(parts: list[LinearPart]) -> tuple[LinearPart, LinearPart]:
    """Return gate and up, splitting them if the checkpoint fuses them."""
    if len(parts) == 1:
        width = parts[0].weight.shape[0] // 2
        return parts[0].rows(slice(0, width)), parts[0].rows(slice(width, None))
    gate, up = parts
    return gate, up
