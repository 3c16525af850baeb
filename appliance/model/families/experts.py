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

# Settings that change how experts are chosen or what they compute, with the values that leave the
# choice as `read_experts` makes it. A family reads those that it gives another meaning.
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
) -> ExpertsSpec:
    """Read the experts of a layer.

    Args:
        config: the whole config.
        count: the setting that holds the number of experts.
        chosen: the one that holds how many are chosen.
        width: the setting that holds an expert's width.
        activation_key: the setting that names the nonlinearity.
        gating: what the gates do instead.
        bias: the experts' linears have biases.
        scoring: what becomes of the router's logits.
        router_bias: the router's logits have a bias.
        renormalize: the chosen experts' weights are divided by their sum.
        selection_bias: the checkpoint holds a bias that only the choice sees.
        grouped: the family reads groups and a scale.
        best_of_group: experts whose scores are a group's.
        scale: of the weights, if the family reads one without groups.
        epsilon: added to the sum of the weights.
        shared_width: of the MLP beside the experts; 0 for none.
        gated: the experts and that MLP have a gate; see `MLPSpec`.
        shared_gate: what that MLP says has a factor of its own.
        expert_scale: the checkpoint has a factor of each expert's weights.
        own_norms: see `ExpertsSpec`.

    Raises:
        CheckpointError: numbers contradict each other.
        UnsupportedModelError: a setting of the router is unknown here.
    """
    experts = config.integer(count)
    top_k = config.integer(chosen)
    if top_k > experts:
        raise _contradiction(config, chosen, top_k, f"at most {count} = {experts}")
    groups = config.integer("n_group", 1) if grouped else 1
    top_groups = config.integer("topk_group", 1) if grouped else 1
    if grouped:
        _check_groups(config, experts, top_k, groups, top_groups, best_of_group)
    for name, usual in (("scoring_func", scoring.value), ("score_function", scoring.value)):
        if config.text(name, usual) != usual:
            raise config.refuse(name, usual)
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
    )


def _check_groups(
    config: ConfigReader, experts: int, top_k: int, groups: int, top_groups: int, best: int
) -> None:
    if experts % groups or (groups > 1 and experts // groups < best):
        raise _contradiction(config, "n_group", groups, f"a divisor of {experts} experts")
    if top_groups > groups:
        raise _contradiction(config, "topk_group", top_groups, f"at most n_group = {groups}")
    within = top_groups * (experts // groups)
    if top_k > within:
        raise _contradiction(
            config, "num_experts_per_tok", top_k, f"at most the {within} experts of topk_group"
        )


def _contradiction(config: ConfigReader, key: str, value: int, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{config.origin}: {key} is {value}, but must be {expected}; fetch the model again"
    )


def read_sparse_layers(config: ConfigReader) -> list[bool]:
    """Read which layers have experts: each of `decoder_sparse_step`, but for `mlp_only_layers`.

    Raises:
        CheckpointError: `mlp_only_layers` is no list of layers.
    """
    num_layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step", 1)
    dense = config.value("mlp_only_layers", [])
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < num_layers for layer in dense
    ):
        raise CheckpointError(
            f"{config.origin}: mlp_only_layers is {str(dense)[:80]}, but must list layers from 0 "
            f"to {num_layers - 1}; fetch the model again"
        )
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]
