"""InternLM 2 and 2.5: Llama whose query, key and value share a matrix, by key head.

transformers has no class of it; the rule is the code that its maker publishes beside the weights,
which is never run. Its "dynamic" RoPE is plain within the trained context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import rope_section, scaled_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames
from appliance.model.spec import RopeSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_THETA = 10000.0  # for configs without it


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("bias")
    attention = read_attention(
        config, _read_rope(config, head_dim), head_dim, qkv_bias=bias, output_bias=bias
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "internlm2", layers)


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    section, theta = rope_section(config), config.number("rope_theta", _THETA)
    if (section.value("rope_type") or section.value("type")) != "dynamic":
        return scaled_rope(config, section, theta, head_dim)
    # Its factor counts beyond `max_position_embeddings`, which no sequence reaches.
    return RopeSpec(theta=section.number("rope_theta", theta), rotary_dim=head_dim)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return {"hidden_act": "silu"} | gguf_biases(file, attention="bias")

    return gguf_config(file, "internlm2", extra)


INTERNLM2 = Family(
    name="internlm2",
    model_type="internlm2",
    architectures=("InternLM2ForCausalLM",),
    read=_read,
    names=TensorNames(
        embedding="model.tok_embeddings",
        head="output",
        mixer_norm="attention_norm",
        qkv=("attention.wqkv",),
        qkv_by_key_head=True,
        output="attention.wo",
        mlp_norm="ffn_norm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    ),
    # Files have query, key and value apart.
    gguf=GGUFMapping(
        "internlm2",
        _gguf,
        GGUF_NAMES,
        interleaved_rope=True,
        own_names=replace(TensorNames(), embedding="model.tok_embeddings", head="output"),
    ),
)
