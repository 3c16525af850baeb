"""ChatGLM 2 and 3 and GLM-4 under their maker's own names: GLM with fused matrices.

transformers has the arithmetic as `glm`, but no class of these settings and names: they are those
of the code that the maker publishes beside the weights, which is never run. GGUF files that are
labelled so are read as `glm`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.standard import read_attention, read_decoder
from appliance.model.names import TensorNames
from appliance.model.spec import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_THETA = 10000.0  # times `rope_ratio`
# Settings that change the arithmetic, with the only values that published models have.
_USUAL: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "position_encoding_2d": False,  # ChatGLM 1
    "post_layer_norm": True,
    "pre_seq_len": None,
    "quantization_bit": 0,
    "rmsnorm": True,
}


def _read(config: ConfigReader) -> DecoderSpec:
    for key, usual in _USUAL.items():
        if config.value(key, usual) != usual:
            raise config.refuse(key, repr(usual))
    head_dim, bias = config.integer("head_dim"), config.flag("add_bias_linear")
    shares_keys = config.flag("multi_query_attention")
    heads = config.integer("num_attention_heads")
    rope = RopeSpec(theta=_THETA * config.number("rope_ratio"), rotary_dim=head_dim // 2)
    attention = read_attention(
        config,
        rope,
        head_dim,
        num_kv_heads=config.integer("num_key_value_heads") if shares_keys else heads,
        qkv_bias=bias or config.flag("attention_bias"),
        output_bias=bias,
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "chatglm", layers, mlp_bias=bias)


def _is_text(config: Mapping[str, Any]) -> bool:
    return config.get("vision_config") is None


CHATGLM = Family(
    name="chatglm",
    model_type="chatglm",
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    read=_read,
    covers=_is_text,
    names=TensorNames(
        embedding="transformer.embedding.word_embeddings",
        final_norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
        layer="transformer.encoder.layers.{}.",
        qkv=("self_attention.query_key_value",),
        rotated_pairs=True,
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    defaults=ClassDefaults(
        values={
            "vocab_size": 65024,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 28,
            "num_attention_heads": 32,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_ratio": 1.0,
            "tie_word_embeddings": False,
            "add_bias_linear": False,
            "attention_bias": False,
            "multi_query_attention": False,
        },
        aliases={
            "num_layers": "num_hidden_layers",
            "padded_vocab_size": "vocab_size",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "seq_length": "max_position_embeddings",
            "layernorm_epsilon": "rms_norm_eps",
            "multi_query_group_num": "num_key_value_heads",
            "add_qkv_bias": "attention_bias",
        },
    ),
)
