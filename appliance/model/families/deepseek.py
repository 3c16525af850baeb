"""DeepSeek V2 to V3.2, GLM-4.7-Flash and GLM-5: latent attention, routed and shared experts.

V3.2 and GLM-5 choose the positions that a query sees, all of them up to `index_topk`: contexts end
there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_config,
    gguf_experts,
    gguf_latent,
    gguf_rope_scaling,
)
from appliance.model.families.mixers import read_latent_attention
from appliance.model.families.standard import read_decoder, read_layer_kinds
from appliance.model.names import DraftHeadNames, ExpertNames, TensorNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, ExpertsSpec, LatentAttentionSpec

_EPSILON = 1e-20  # of sigmoid routers, in transformers
_SIGMOID = 2  # `expert_gating_func` of GGUF
_OF_GATING = ("expert_gating_func", "block_count", "nextn_predict_layers", "vocab_size")
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154880
_IN_GROUPS = "group_limited_greedy"
_BY_BIAS = "noaux_tc"


def _read_v2(config: ConfigReader) -> DecoderSpec:
    method = config.text("topk_method")
    if method not in ("greedy", _IN_GROUPS):
        raise config.refuse("topk_method", f"greedy and {_IN_GROUPS} with this architecture")
    for name in ("n_group", "topk_group", "norm_topk_prob"):
        config.value(name)  # without effect for the other method
    dense = config.integer("first_k_dense_replace")
    experts = read_experts(
        config,
        count="n_routed_experts",
        renormalize=False,
        grouped=method == _IN_GROUPS,
        best_of_group=1,
        scale=config.number("routed_scaling_factor"),
        shared_width=_shared_width(config),
    )
    return _read(config, "deepseek_v2", experts, dense)


def _read_v3(config: ConfigReader) -> DecoderSpec:
    dense = config.integer("first_k_dense_replace")
    return _read(config, "deepseek_v3", _read_by_sigmoid(config), dense)


def _read_glm(config: ConfigReader) -> DecoderSpec:
    layers = config.integer("num_hidden_layers")
    kinds = read_layer_kinds(config, {"dense": True, "sparse": False}, layers, "mlp_layer_types")
    return _read(config, "glm4_moe_lite", _read_by_sigmoid(config), 1, kinds)


def _read_v32(config: ConfigReader) -> DecoderSpec:
    return _read_indexed(config, "deepseek_v32")


def _read_glm5(config: ConfigReader) -> DecoderSpec:
    return _read_indexed(config, "glm_moe_dsa")


def _read_indexed(config: ConfigReader, architecture: str) -> DecoderSpec:
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    kinds = read_layer_kinds(config, {"dense": True, "sparse": False}, layers, "mlp_layer_types")
    read_layer_kinds(config, {"indexed_attention": True}, layers)
    config.value("head_dim")  # the class replaces it
    attention = read_latent_attention(config, interleaved=True)
    attention = replace(attention, chosen=config.integer("index_topk"))
    return _read(config, architecture, _read_by_sigmoid(config), dense, kinds, attention)


def _read_by_sigmoid(config: ConfigReader) -> ExpertsSpec:
    if config.text("topk_method", _BY_BIAS) != _BY_BIAS:
        raise config.refuse("topk_method", f"{_BY_BIAS} with this architecture")
    return read_experts(
        config,
        count="n_routed_experts",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=True,
        grouped=True,
        epsilon=_EPSILON,
        shared_width=_shared_width(config),
    )


def _shared_width(config: ConfigReader) -> int:
    return config.integer("moe_intermediate_size") * config.integer("n_shared_experts")


def _read(
    config: ConfigReader,
    architecture: str,
    experts: ExpertsSpec,
    num_dense: int,
    kinds: list[bool] | None = None,
    attention: LatentAttentionSpec | None = None,
) -> DecoderSpec:
    layers = config.integer("num_hidden_layers")
    is_dense = kinds or [index < num_dense for index in range(layers)]
    config.value("num_key_value_heads")  # without effect: all heads share one latent
    if config.knows("mlp_bias") and config.flag("mlp_bias"):
        raise config.refuse("mlp_bias", "false with this architecture")
    return read_decoder(
        config,
        architecture,
        [attention or read_latent_attention(config)] * layers,
        experts=[None if dense else experts for dense in is_dense],
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "deepseek2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    scaling = gguf_rope_scaling(meta)
    if scaling is not None and "mscale" in scaling:  # these files store a tenth of it
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * scaling["mscale"]
    settings = gguf_deepseek_experts(meta)
    method = _IN_GROUPS if settings["n_group"] > 1 else "greedy"
    if _gates_by_sigmoid({key: meta.value(key) for key in _OF_GATING}):
        method = _BY_BIAS
    rest = {"hidden_act": "silu", "rope_scaling": scaling, "topk_method": method}
    return rest | gguf_latent(meta) | settings


def gguf_deepseek_experts(meta: ConfigReader) -> dict[str, Any]:
    """Read the settings of a GGUF file's experts and shared experts."""
    meta.value("expert_gating_func")  # decides the family
    return {
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
    } | gguf_experts(meta, "n_routed_experts")


def _gates_by_sigmoid(settings: Mapping[str, Any]) -> bool:
    gating = settings.get("expert_gating_func")
    if not gating:  # GLM-4.7-Flash, whose files lack it
        layers = settings.get("block_count", 0) - (settings.get("nextn_predict_layers") or 0)
        return layers in _GLM_LAYERS and settings.get("vocab_size") == _GLM_VOCABULARY
    return bool(gating == _SIGMOID)


_NAMES = TensorNames(
    experts=ExpertNames(
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    read=_read_v2,
    names=_NAMES,
    gguf=GGUFMapping("deepseek2", _gguf, GGUF_NAMES),
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    read=_read_v3,
    names=_NAMES,
    gguf=GGUFMapping("deepseek2", _gguf, GGUF_NAMES, is_of=_gates_by_sigmoid),
    draft_head=DraftHeadNames(),
)
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    model_type="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    read=_read_glm,
    names=_NAMES,
    draft_head=DraftHeadNames(),
)
DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    model_type="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    read=_read_v32,
    names=_NAMES,
)
GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    model_type="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    read=_read_glm5,
    names=_NAMES,
)
