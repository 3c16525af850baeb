"""Step 3.5 and 3.7 Flash: windows with more heads, gates of heads, bounds of experts by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.activation import Activation, BoundedSwiGLU
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family
from appliance.model.families.limits import RANGES
from appliance.model.families.reader import ConfigReader
from appliance.model.families.rope import scaled_rope, section_of_layers
from appliance.model.families.standard import (
    layer_keys,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
    read_layer_types,
    read_window,
)
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.kernels.activation import Gating
    from appliance.model.spec import DecoderSpec, ExpertsSpec, RopeSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIRST_SPARSE = 3  # layer with experts, without a list
# Settings that only the maker's own code reads, with what transformers' class takes for granted.
_FIXED = {
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "yarn_only_types": [_FULL],
}


def _read(config: ConfigReader) -> DecoderSpec:
    for key, usual in _FIXED.items():
        if config.value(key, usual) != usual:
            raise config.refuse(key, f"{usual!r} with this architecture")
    if "gating" in config and config.value("gating") not in (True, "per-head"):
        raise config.refuse("gating", "true and 'per-head' with this architecture")
    count = config.integer("num_hidden_layers")
    config = _without_draft_layers(config, count)
    slides, window = read_layer_types(config, [False] * count), read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    head_dim = read_head_dim(config)
    ropes = {kind: _read_rope(config, slides, kind, head_dim) for kind in dict.fromkeys(slides)}
    bias, heads = config.flag("attention_bias"), _read_heads(config, slides)
    usual = read_attention(
        config,
        next(iter(ropes.values())),
        head_dim,
        scale=config.number("query_pre_attn_scalar", head_dim) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps"), offset=1.0),
        head_gates=True,
    )
    if any(number % usual.num_kv_heads for number in heads):
        raise config.refuse("num_key_value_heads", f"a divisor of the layers' heads, {heads}")
    attention = [
        replace(usual, num_heads=number, rope=ropes[sliding], window=window if sliding else None)
        for number, sliding in zip(heads, slides, strict=True)
    ]
    return read_decoder(
        config, "step3p7", attention, mlps=_read_mlps(config, count), norm_offset=1.0
    )


def _without_draft_layers(config: ConfigReader, count: int) -> ConfigReader:
    """Return the settings with lists of `count` layers: makers' go on with the draft head's."""
    given = config.value("num_nextn_predict_layers")
    further = (count + given,) if isinstance(given, int) else ()
    for key in (
        "layer_types",
        "mlp_layer_types",
        "swiglu_limits",
        "swiglu_limits_shared",
        "rope_theta",
        "partial_rotary_factors",
    ):
        value = config.value(key)
        if isinstance(value, list) and len(value) in (count, *further):
            config = config.with_value(key, value[:count])
    return config


def _read_heads(config: ConfigReader, slides: Sequence[bool]) -> list[int]:
    """Read each layer's number of query heads, from the newest setting that is there."""
    usual = config.integer("num_attention_heads")
    if config.is_given("per_layer_config"):
        layers = config.section("per_layer_config")
        keys = layer_keys(layers, config.value("per_layer_config"), len(slides))
        found = []
        for index in range(len(slides)):
            own = layers.section(keys.get(index, str(index)))
            found.append(own.integer("num_attention_heads", usual))
            own.refuse_unknown(frozenset())
        config.value("num_sliding_attention_heads")  # repeats it
        return found
    sliding = config.value("num_sliding_attention_heads")
    other = config.section("attention_other_setting")
    if sliding is None and config.is_given("attention_other_setting"):
        sliding = other.integer("num_attention_heads", usual)
        for key, same in (
            ("num_attention_groups", config.integer("num_key_value_heads")),
            ("head_dim", read_head_dim(config)),
            ("attention_type", _SLIDING),
        ):
            if other.value(key, same) != same:
                raise other.refuse(key, f"{same!r}, as in the other layers")
    elif sliding is not None:
        sliding = config.integer("num_sliding_attention_heads")
    return [sliding if sliding is not None and slide else usual for slide in slides]


def _read_rope(
    config: ConfigReader, slides: Sequence[bool], sliding: bool, head_dim: int
) -> RopeSpec:
    """Read the rotation of a kind of layers: of its section, or of lists of all layers."""
    first, sections = list(slides).index(sliding), config.section("rope_parameters")
    kinds = [_SLIDING if each else _FULL for each in slides]
    is_given = config.is_given("rope_parameters")
    if is_given and all(isinstance(sections.value(kind), dict) for kind in kinds):
        section = section_of_layers(sections, kinds[first])
        return scaled_rope(config, section, None, head_dim, partial=True)
    theta, share = config.value("rope_theta"), config.value("partial_rotary_factors")
    if isinstance(theta, list):
        theta = config.numbers("rope_theta", len(slides))[first]
    elif theta is not None:
        theta = config.number("rope_theta")
    if share is not None:
        share = config.numbers("partial_rotary_factors", len(slides))[first]
    scaling = config.section("rope_scaling")
    section = ConfigReader({}, config.origin) if sliding else scaling
    return scaled_rope(
        config, section, theta, head_dim, partial=True, share=1.0 if share is None else share
    )


def _read_mlps(config: ConfigReader, count: int) -> list[MLPSpec | ExpertsSpec | None]:
    bias, width = config.flag("mlp_bias"), config.integer("intermediate_size")
    shared_width = config.integer("share_expert_dim")
    config.value("hidden_act")  # the class replaces it
    experts = read_experts(
        config.with_value("hidden_act", "silu"),
        count="n_routed_experts",
        gating=Activation.SILU,
        scoring=Scoring.SIGMOID,
        selection_bias=True,
        scale=config.number("moe_router_scaling_factor"),
    )
    found: list[MLPSpec | ExpertsSpec | None] = []
    own, shared = (
        _read_gatings(config, key, count) for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    for index, is_sparse in enumerate(_read_sparse(config, count)):
        if not is_sparse:
            found.append(MLPSpec(width, shared[index], bias))
            continue
        of_all = MLPSpec(shared_width, shared[index], bias)
        found.append(replace(experts, activation=own[index], shared=of_all))
    return found


def _read_gatings(config: ConfigReader, key: str, count: int) -> list[Gating]:
    """Read each layer's bound of gate and up; 0 and null are none."""
    listed = config.value(key, [None] * count)
    usual = RANGES["swiglu_limit"]
    fits = isinstance(listed, list) and len(listed) == count
    if not fits or any(each and (isinstance(each, bool) or each not in usual) for each in listed):
        raise config.refuse(key, f"a list of {count} numbers from {usual.least} to {usual.most}")
    return [BoundedSwiGLU(float(each)) if each else Activation.SILU for each in listed]


def _read_sparse(config: ConfigReader, count: int) -> list[bool]:
    """Read which layers have experts."""
    kinds = {"dense": False, "sparse": True}
    found = read_layer_kinds(config, kinds, count, "mlp_layer_types")
    listed: Any = config.value("moe_layers_enum")
    if found is not None:
        return found
    if listed is None:
        return [index >= _FIRST_SPARSE for index in range(count)]
    items = listed.split(",") if isinstance(listed, str) else listed
    numbers = [str(item).strip() for item in items] if isinstance(items, list) else ["?"]
    if any(number and not (number.isascii() and number.isdigit()) for number in numbers):
        raise CheckpointError(
            f"{config.origin}: moe_layers_enum is {str(listed)[:80]!r}, but must list layers, "
            "such as '3,4,5'; take the config.json of its makers"
        )
    sparse = {int(number) for number in numbers if number}
    return [index in sparse for index in range(count)]


_NAMES = TensorNames(
    experts=ExpertNames(
        router="moe.gate",
        selection_bias="moe.router_bias",
        gate_up=("moe.experts.{}.gate_proj", "moe.experts.{}.up_proj"),
        down="moe.experts.{}.down_proj",
        shared_gate_up=("share_expert.gate_proj", "share_expert.up_proj"),
        shared_down="share_expert.down_proj",
        stacked_apart=("moe.gate_proj.weight", "moe.up_proj.weight"),
        stacked_down="moe.down_proj.weight",
    ),
)

STEP3P7 = Family(
    name="step3p7",
    model_type="step3p5",
    architectures=("Step3p5ForCausalLM", "Step3p7FlashForCausalLM"),
    read=_read,
    names=_NAMES,
    other_names=replace(  # of transformers' own modules
        _NAMES,
        experts=ExpertNames(
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        ),
    ),
)
