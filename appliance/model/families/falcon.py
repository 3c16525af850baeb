"""Falcon, 7B, 40B, 180B and Falcon 2: attention and MLP in parallel, one or a few key heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_activation, read_attention, read_decoder
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias, is_new = config.flag("bias"), config.flag("new_decoder_architecture")
    if not (head_dim := hidden // heads):
        raise config.refuse("num_attention_heads", f"at most hidden_size, which is {hidden}")
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        num_kv_heads=_key_heads(config, is_new, heads),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = MLPSpec(
        config.integer("ffn_hidden_size", 4 * hidden),
        read_activation(config, "activation", gated=False),
        bias,
        gated=False,
    )
    parallel, two_norms = config.flag("parallel_attn"), _has_two_norms(config, is_new)
    if is_new and not parallel:
        raise config.refuse("parallel_attn", "true with new_decoder_architecture")
    layers = config.integer("num_hidden_layers")
    decoder = read_decoder(
        config,
        "falcon",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(config.number("layer_norm_epsilon"), centered=True),
    )
    one = parallel and not two_norms
    made = (replace(layer, parallel=parallel, one_norm=one) for layer in decoder.layers)
    return replace(decoder, layers=tuple(made))


def _key_heads(config: ConfigReader, is_new: bool, heads: int) -> int:
    shares = config.flag("multi_query")
    if is_new:
        count = config.integer("num_kv_heads", heads)
        if heads % count:
            raise config.refuse("num_kv_heads", f"a divisor of num_attention_heads, {heads}")
        return count
    if not shares and config.integer("num_kv_heads", heads) != heads:
        raise config.refuse("num_kv_heads", f"num_attention_heads, {heads}, without multi_query")
    return 1 if shares else heads


def _has_two_norms(config: ConfigReader, is_new: bool) -> bool:
    count = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if count == 2 and not is_new:
        raise config.refuse("num_ln_in_parallel_attn", "1 without new_decoder_architecture")
    return count == 2


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "falcon", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """Read the remaining settings; only the tensors tell the architecture's variant."""
    heads, names = meta.integer("attention.head_count_kv"), file.tensor_names()
    two_norms = "blk.0.attn_norm_2.weight" in names
    return {
        "activation": "gelu",
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
        "ffn_hidden_size": meta.integer("feed_forward_length"),
        "num_kv_heads": heads,
        "new_decoder_architecture": two_norms or heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "bias": any(name.endswith((".attn_qkv.bias", ".ffn_up.bias")) for name in names),
    }


_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("self_attention.query_key_value",),
    qkv_by_key_head=True,
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

_GGUF_NAMES = replace(GGUF_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",))

FALCON = Family(
    name="falcon",
    model_type="falcon",
    architectures=("FalconForCausalLM",),
    read=_read,
    names=_NAMES,
    other_names=replace(_NAMES, mixer_norm="ln_attn", mlp_norm="ln_mlp"),
    gguf=GGUFMapping(
        "falcon",
        _gguf,
        _GGUF_NAMES,
        other_names=replace(_GGUF_NAMES, mixer_norm="attn_norm_2", mlp_norm="attn_norm"),
    ),
)
