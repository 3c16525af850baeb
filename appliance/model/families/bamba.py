"""Bamba: Mamba-2, and attention in a few layers, which rotates half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import CheckpointError
from appliance.model.families.family import Family
from appliance.model.families.mamba2 import read_mamba2
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True, share=0.5),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
    )
    mamba2, layers = read_mamba2(config), config.integer("num_hidden_layers")
    attends = config.value("attn_layer_indices", [])
    if not isinstance(attends, list) or any(
        type(index) is not int or not 0 <= index < layers for index in attends
    ):
        raise CheckpointError(
            f"{config.origin}: attn_layer_indices is {str(attends)[:80]}, but must list layers "
            f"from 0 to {layers - 1}; fetch the model again"
        )
    return read_decoder(
        config,
        "bamba",
        [attention if index in attends else mamba2 for index in range(layers)],
        mlp_bias=config.flag("mlp_bias"),
    )


BAMBA = Family(
    name="bamba",
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    read=_read,
    names=TensorNames(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
)
