"""Reads the parts of a spec that families share from a Hugging Face config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import CheckpointError
from appliance.kernels.activation import Activation
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import RopeSpec

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


def read_head_dim(config: ConfigReader, default: int | None = None) -> int:
    """Read the elements per head; by default the family's, or width divided by heads."""
    usual = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", default or usual)


def read_attention(
    config: ConfigReader,
    rope: RopeSpec,
    head_dim: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: NormSpec | None = None,
) -> AttentionSpec:
    """Read attention with the config's heads; the default score scale is 1 / sqrt(head_dim)."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of {num_heads} attention heads")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope,
        window=window,
        softcap=softcap,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def read_decoder(
    config: ConfigReader,
    architecture: str,
    attention: Sequence[AttentionSpec],
    *,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    norm_offset: float = 0.0,
    post_norms: bool = False,
    tied_head: bool = False,
    embedding_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """Read a decoder whose layers differ only in their attention.

    Args:
        config: the whole config.
        architecture: name of the family.
        attention: one per layer.
        activation: the setting that names the MLP's nonlinearity.
        mlp_bias: the MLP's linears have biases.
        norm_offset: added to the weights of the norms.
        post_norms: attention and MLP are each followed by a norm.
        tied_head: embedding and head are one matrix, unless the config says otherwise.
        embedding_scale: multiplies the embedding.
        logit_softcap: logits become cap * tanh(logits / cap).
    """
    act = config.text(activation, "silu")
    if act not in _ACTIVATIONS:
        raise config.refuse(activation, ", ".join(_ACTIVATIONS))
    norm = NormSpec(config.number("rms_norm_eps"), norm_offset)
    mlp = MLPSpec(config.integer("intermediate_size"), _ACTIVATIONS[act], mlp_bias)
    return DecoderSpec(
        architecture=architecture,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
        layers=tuple(LayerSpec(spec, mlp, norm, post_norms) for spec in attention),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", tied_head),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
    )


def read_window(config: ConfigReader, default: int | None = None) -> int | None:
    """Read `sliding_window`: absent means the family's default, null or 0 means none."""
    if "sliding_window" not in config:
        return default
    return config.integer("sliding_window") if config.value("sliding_window") else None


def read_layer_types(config: ConfigReader, usual: Sequence[bool]) -> list[bool]:
    """Read from `layer_types` whether each layer slides; `usual` if it is absent."""
    layer_types = config.value("layer_types")
    if layer_types is None:
        return list(usual)
    if not isinstance(layer_types, list) or len(layer_types) != len(usual):
        raise CheckpointError(
            f"{config.origin}: layer_types must list {len(usual)} layers; fetch the model again"
        )
    if any(kind not in ("full_attention", "sliding_attention") for kind in layer_types):
        raise config.refuse("layer_types", "full_attention and sliding_attention")
    return [kind == "sliding_attention" for kind in layer_types]
