"""Mistral 4: latent attention whose queries grow with their position, softmax routing in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.deepseek import gguf_deepseek_experts
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_config,
    gguf_growing_rope,
    gguf_latent,
)
from appliance.model.families.mixers import read_latent_attention
from appliance.model.families.rope import read_growing_rope
from appliance.model.families.standard import read_decoder
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-20  # of its router, in transformers
_BETA = 0.1


def _read(config: ConfigReader) -> DecoderSpec:
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    turning = config.integer("qk_rope_head_dim")
    rope = read_growing_rope(config, turning, turning + config.integer("qk_nope_head_dim"))
    width = config.integer("moe_intermediate_size")
    experts = read_experts(
        config,
        count="n_routed_experts",
        renormalize=config.flag("norm_topk_prob"),
        grouped=True,
        epsilon=_EPSILON,
        shared_width=width * config.integer("n_shared_experts"),
    )
    config.value("num_key_value_heads")  # without effect: all heads share one latent
    return read_decoder(
        config,
        "mistral4",
        [read_latent_attention(config, rope)] * layers,
        experts=[None if index < dense else experts for index in range(layers)],
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "mistral4", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    rope = gguf_growing_rope(meta)
    if "mscale" in rope:  # these files store a tenth of it
        rope["mscale"] = rope["mscale_all_dim"] = 10 * rope["mscale"]
    rope.setdefault("llama_4_scaling_beta", _BETA)  # true of all models; the file lacks it
    return (
        {"hidden_act": "silu", "rope_scaling": None, "rope_parameters": rope}
        | gguf_latent(meta)
        | gguf_deepseek_experts(meta)
    )


MISTRAL4 = Family(
    name="mistral4",
    model_type="mistral4",
    architectures=("Mistral4ForCausalLM",),
    read=_read,
    names=TensorNames(
        experts=ExpertNames(
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        )
    ),
    gguf=GGUFMapping("mistral4", _gguf, GGUF_NAMES),
)
