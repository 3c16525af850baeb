"""Reads the settings of experts and their router from a Hugging Face config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.routing import Router, Scoring
from appliance.model.families.standard import read_activation
from appliance.model.spec import ExpertsSpec, MLPSpec

if TYPE_CHECKING:
    from appliance.kernels.activation import Gating
    from appliance.model.families.reader import ConfigReader

# Settings that change routing or the experts' arithmetic, with the values under which
# `read_experts` is right. A family reads those it gives another meaning.
_ROUTER_SETTINGS: dict[str, tuple[Any, ...]] = {
    "enable_moe_block": (False,),
    "first_k_dense_replace": (0,),
    "mlp_layer_types": ("sparse",),
    "mlp_only_layers": (),
    "moe_latent_size": (),
    "moe_layer_freq": (1,),
    "moe_router_logit_softcapping": (0,),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "num_dense_layers": (0,),
    "per_expert_scale": (),
    "routed_scaling_factor": (1,),
    "router_bias": (False,),
    "shared_expert_intermediate_size": (0,),
    "swiglu_limit": (),
    "topk_group": (1,),
    "use_expert_bias": (False,),
}


def read_experts(
    config: ConfigReader,
    *,
    count: str,
    chosen: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    activation_key: str = "hidden_act",
    gating: Gating | None = None,
    bias: bool = False,
    scoring: Scoring = Scoring.SOFTMAX,
    router_bias: bool = False,
    renormalize: bool = True,
    selection_bias: bool = False,
    grouped: bool = False,
    best_of_group: int = 2,
    scale: float | None = None,
    epsilon: float = 0.0,
    shared_width: int = 0,
    gated: bool = True,
    shared_gate: bool = False,
    expert_scale: bool = False,
    own_norms: bool = False,
    latent: int | None = None,
    by_layer: bool = False,
) -> ExpertsSpec:
    """Read the experts of a layer.

    Args:
        count: setting with the number of experts.
        chosen: setting with the number chosen per token.
        activation_key: setting that names the nonlinearity.
        gating: replaces that nonlinearity.
        scoring: function of the router's logits.
        router_bias: the router's logits have a bias.
        renormalize: divide the chosen experts' weights by their sum.
        selection_bias: the checkpoint has a bias that affects only the choice.
        grouped: the family reads groups and a scale.
        best_of_group: number of experts whose scores sum up to their group's.
        scale: of the weights, if the family reads one without groups.
        epsilon: added to the sum of the weights.
        shared_width: of the shared MLP; 0 for none.
        gated: experts and shared MLP have a gate; see `MLPSpec`.
        shared_gate: the shared MLP's output is multiplied by a gate.
        expert_scale: the checkpoint has a factor per expert.
        own_norms: see `ExpertsSpec`.
        latent: see `ExpertsSpec`.
        by_layer: the numbers of experts and of chosen ones may be listed for each layer, the same
            in all.

    Raises:
        CheckpointError: numbers contradict each other.
        UnsupportedModelError: a setting of the router is not supported.
    """
    read = config.integer_of_layers if by_layer else config.integer
    experts = read(count)
    top_k = read(chosen)
    if top_k > experts:
        raise _contradiction(config, chosen, top_k, f"at most {config.written(count)} = {experts}")
    groups = config.integer("n_group", 1) if grouped else 1
    top_groups = config.integer("topk_group", 1 if groups == 1 else None) if grouped else 1
    if grouped:
        _check_groups(config, count, experts, top_k, groups, top_groups, best_of_group)
    # The method that chooses by sigmoids and a bias, which dots.llm1 names in the place of these.
    same = (scoring.value, *(["noaux_tc"] if scoring is Scoring.SIGMOID else []))
    for name in ("scoring_func", "score_function"):
        if config.text(name, scoring.value) not in same:
            raise config.refuse(name, scoring.value)
    router = Router(
        num_experts=experts,
        top_k=top_k,
        scoring=scoring,
        bias=router_bias,
        renormalize=renormalize,
        selection_bias=selection_bias,
        num_groups=groups,
        top_groups=top_groups,
        best_of_group=best_of_group,
        scale=scale or (config.number("routed_scaling_factor", 1.0) if grouped else 1.0),
        epsilon=epsilon,
        expert_scale=expert_scale,
    )
    activation = read_activation(config, activation_key)
    config.refuse_unread(_ROUTER_SETTINGS)
    return ExpertsSpec(
        intermediate_size=config.integer(width),
        activation=gating or activation,
        router=router,
        shared=MLPSpec(shared_width, activation, gated=gated) if shared_width else None,
        shared_gate=shared_gate,
        bias=bias,
        own_norms=own_norms,
        gated=gated,
        latent=latent,
    )


def _check_groups(
    config: ConfigReader,
    count: str,
    experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    best: int,
) -> None:
    if experts % groups or (groups > 1 and experts // groups < best):
        raise _contradiction(config, "n_group", groups, f"a divisor of {count} = {experts}")
    if top_groups > groups:
        raise _contradiction(config, "topk_group", top_groups, f"at most n_group = {groups}")
    within = top_groups * (experts // groups)
    if top_k > within:
        raise _contradiction(
            config, "num_experts_per_tok", top_k, f"at most the {within} experts of topk_group"
        )


def _contradiction(config: ConfigReader, key: str, value: int, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{config.origin}: {config.written(key)} is {value}, but must be {expected};"
        " take the config.json of its makers"
    )


def read_sparse_layers(config: ConfigReader) -> list[bool]:
    """Read which layers have experts: every `decoder_sparse_step`th, except `mlp_only_layers`.

    Raises:
        CheckpointError: `mlp_only_layers` is no list of layers.
    """
    num_layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step")
    dense = config.layers("mlp_only_layers", num_layers)
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]
