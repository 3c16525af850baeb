"""MiniMax M2: norms of all heads at once, part of a head rotates, sigmoid routing by a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.head_norms import HeadNormKind
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_experts
from appliance.model.families.rope import rope_section, scaled_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, RopeSpec

_SIGMOID = 2  # `expert_gating_func` of GGUF


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, layers = read_head_dim(config), config.integer("num_hidden_layers")
    attention = read_attention(
        config,
        _read_rope(config, head_dim),
        head_dim,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
        head_norms=HeadNormKind.ALL,
    )
    _pass_over_what_is_so(config)
    experts = read_experts(
        config,
        count="num_local_experts",
        width="intermediate_size",
        scoring=Scoring.SIGMOID,
        selection_bias=True,
    )
    return read_decoder(config, "minimax_m2", [attention] * layers, experts=[experts] * layers)


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the rotary settings; published configs give the part that rotates in elements."""
    share = config.number("partial_rotary_factor", 1.0)
    if config.value("rotary_dim") is not None:
        share = config.integer("rotary_dim") / head_dim
    return scaled_rope(config, rope_section(config), "rope_theta", head_dim, True, share)


def _pass_over_what_is_so(config: ConfigReader) -> None:
    """Read settings that the class ignores, as they hold of every model."""
    for key, usual in (("use_qk_norm", True), ("use_routing_bias", True)):
        if config.value(key, usual) is not usual:
            raise config.refuse(key, str(usual))
    if config.value("qk_norm_type", "per_layer") != "per_layer":
        raise config.refuse("qk_norm_type", "per_layer")


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "minimax-m2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise meta.refuse("expert_gating_func", f"{_SIGMOID} with this architecture")
    experts = gguf_experts(meta, "num_local_experts")
    width = experts.pop("moe_intermediate_size", meta.integer("feed_forward_length"))
    return {"hidden_act": "silu", "intermediate_size": width} | experts


MINIMAX_M2 = Family(
    name="minimax_m2",
    model_type="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    read=_read,
    names=TensorNames(
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            selection_bias="block_sparse_moe.e_score_correction_bias",
            gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            down="block_sparse_moe.experts.{}.w2",
            stacked_gate_up="block_sparse_moe.experts.gate_up_proj",
            stacked_down="block_sparse_moe.experts.down_proj",
        )
    ),
    gguf=GGUFMapping("minimax-m2", _gguf, GGUF_NAMES),
)
