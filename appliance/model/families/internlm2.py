"""InternLM 2 and 2.5: Llama whose query, key and value share a matrix, by key head.

transformers has no class of it; the rule is the code that its maker publishes beside the weights,
which is never run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("bias")
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, qkv_bias=bias, output_bias=bias
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "internlm2", layers)


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
    defaults=ClassDefaults(
        values={
            "vocab_size": 103168,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bias": True,
            "rope_theta": 10000.0,
        },
        known=frozenset({"num_key_value_heads", "rope_scaling"}),
    ),
)
