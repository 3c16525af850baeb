"""Qwen 1: Qwen2 with fused matrices, whose settings count gate and up of the MLP together.

transformers has no class of it: defaults and arithmetic are those of the code that its maker
publishes beside the weights, which is never run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.integer("head_dim")
    if heads * head_dim != hidden:
        raise config.refuse("head_dim", f"hidden_size / num_attention_heads, {hidden} / {heads}")
    bias = not config.flag("no_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=True,
        output_bias=bias,
    )
    spec = read_decoder(
        config,
        "qwen",
        [attention] * config.integer("num_hidden_layers"),
        mlp_bias=bias,
        width=config.integer("intermediate_size") // 2,
    )
    if not (config.flag("use_dynamic_ntk") or config.flag("use_logn_attn")):
        return spec
    # Both change frequencies and scores with the length of what is beyond the trained one.
    trained = config.integer("seq_length")
    return replace(spec, context_length=min(trained, spec.context_length))


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "qwen", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    biases = gguf_biases(file, mlp="mlp")
    fixed = {"use_dynamic_ntk": False, "use_logn_attn": False}  # llama.cpp has neither
    return {"no_bias": not biases["mlp"]} | fixed


QWEN = Family(
    name="qwen",
    model_type="qwen",
    architectures=("QWenLMHeadModel",),
    read=_read,
    names=TensorNames(
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        mixer_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.w2", "mlp.w1"),
        down="mlp.c_proj",
    ),
    gguf=GGUFMapping("qwen", _gguf, replace(GGUF_NAMES, qkv=("attn_qkv",))),
    defaults=ClassDefaults(
        values={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "seq_length": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": False,
            "no_bias": True,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
        },
        # The first five are of the earliest configurations.
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "layer_norm_epsilon": "rms_norm_eps",
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
        known=frozenset({"rope_scaling"}),
    ),
)
