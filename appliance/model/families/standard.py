"""Reads the parts of a spec that families share from a Hugging Face config."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from appliance.errors import CheckpointError
from appliance.kernels.activation import Activation
from appliance.kernels.head_norms import HeadNormKind
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    TokenInputSpec,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import MixerSpec, RopeSpec

Kind = TypeVar("Kind")

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu2": Activation.RELU_SQUARED,
}
_UNGATED = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "quick_gelu": Activation.QUICK_GELU,
}


def read_head_dim(config: ConfigReader) -> int:
    """Read the head width; where its class has no default, hidden size divided by heads."""
    usual = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", usual)


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
    head_norms: HeadNormKind = HeadNormKind.EACH,
    output_gate: bool = False,
    head_gates: bool = False,
    sinks: bool = False,
    value_norm: NormSpec | None = None,
    num_kv_heads: int | None = None,
    keys_are_values: bool = False,
    kv_layer: int | None = None,
) -> AttentionSpec:
    """Read attention with the config's heads; the default score scale is 1 / sqrt(head_dim)."""
    num_heads = config.integer("num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
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
        head_norms=head_norms,
        output_gate=output_gate,
        head_gates=head_gates,
        sinks=sinks,
        value_norm=value_norm,
        keys_are_values=keys_are_values,
        kv_layer=kv_layer,
    )


def read_decoder(
    config: ConfigReader,
    architecture: str,
    mixers: Sequence[MixerSpec | None],
    *,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    width: int | None = None,
    experts: Sequence[ExpertsSpec | None] = (),
    mlps: Sequence[MLPSpec | ExpertsSpec | None] = (),
    norm_eps: str = "rms_norm_eps",
    norm: NormSpec | None = None,
    norm_offset: float = 0.0,
    post_norms: bool = False,
    pre_norms: bool = True,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    output_scale: bool = False,
    token_input: TokenInputSpec | None = None,
) -> DecoderSpec:
    """Read a decoder whose layers differ only in their mixers and MLPs.

    Args:
        activation: setting that names the MLP's nonlinearity.
        mlp_bias: the MLP's linears have biases.
        experts: of each layer, replacing its MLP unless None; empty for no experts.
        mlps: of each layer, overriding the config and `experts`.
        width: of the MLP, if the config lacks `intermediate_size`.
        norm_eps: setting with the norms' epsilon.
        norm: of the stream, overriding `norm_eps` and `norm_offset`.
        post_norms: norms follow attention and MLP.
        pre_norms: norms precede them.
        logit_softcap: logits become cap * tanh(logits / cap).
        output_scale: each layer has a factor of the stream after it.
        token_input: per-layer inputs from tokens.
    """
    norm = norm or NormSpec(config.number(norm_eps), norm_offset)
    usual = experts or [None] * len(mixers)
    mlps = mlps or _read_mlps(config, activation, mlp_bias, width, usual)
    return DecoderSpec(
        architecture=architecture,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        context_length=_context_length(config, mixers),
        layers=tuple(
            LayerSpec(spec, mlp, norm, post_norms, output_scale, pre_norms=pre_norms)
            for spec, mlp in zip(mixers, mlps, strict=True)
        ),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings"),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        token_input=token_input,
    )


def _context_length(config: ConfigReader, mixers: Sequence[MixerSpec | None]) -> int:
    """Return the tokens that positions are made for.

    YaRN says so itself, as vLLM takes it: Qwen's instructions add it and leave
    `max_position_embeddings` at the length before. An indexer ends it; see `LatentAttentionSpec`.
    """
    ropes = (getattr(mixer, "rope", None) for mixer in mixers)
    scaled = [
        int(rope.factor * rope.original_context)
        for rope in ropes
        if rope is not None and rope.scaling is RopeScaling.YARN
    ]
    longest = max(config.integer("max_position_embeddings"), *scaled, 0)
    latent = (mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec))
    return min(longest, *(mixer.chosen or longest for mixer in latent), longest)


def with_multipliers(
    spec: DecoderSpec, *, added: float, embedding: float, logits: float
) -> DecoderSpec:
    """Return a decoder whose layers add `added` times their output to the stream.

    The spec divides the stream by that factor instead: layers add their output, and norms give the
    same result with eps divided by the factor's square.

    Args:
        embedding: factor of embeddings.
        logits: factor of logits.
    """

    def of_stream(norm: NormSpec) -> NormSpec:
        return replace(norm, eps=norm.eps / added**2)

    return replace(
        spec,
        layers=tuple(replace(layer, norm=of_stream(layer.norm)) for layer in spec.layers),
        final_norm=of_stream(spec.final_norm),
        embedding_scale=embedding / added,
        logit_scale=logits,
    )


def _read_mlps(
    config: ConfigReader,
    activation: str,
    bias: bool,
    width: int | None,
    experts: Sequence[ExpertsSpec | None],
) -> list[MLPSpec | ExpertsSpec | None]:
    """Read the MLP of layers without experts."""
    found: list[MLPSpec | ExpertsSpec | None] = [layer for layer in experts if layer is not None]
    if len(found) == len(experts):
        return found
    width = width or config.integer("intermediate_size")
    dense = MLPSpec(width, read_activation(config, activation), bias)
    return [dense if layer is None else layer for layer in experts]


def read_activation(
    config: ConfigReader, key: str = "hidden_act", *, gated: bool = True
) -> Activation:
    """Read the MLP's nonlinearity; some exist only without a gate."""
    known = _ACTIVATIONS if gated else _ACTIVATIONS | _UNGATED
    act = config.text(key) if config.knows(key) else "silu"
    if act not in known:
        raise config.refuse(key, ", ".join(known))
    return known[act]


def read_window(config: ConfigReader) -> int | None:
    """Read `sliding_window`; none if null.

    0 is refused: transformers' classes fail with it, and makers write null.
    """
    is_null = config.value("sliding_window") is None
    return None if is_null else config.integer("sliding_window")


def read_layer_types(config: ConfigReader, usual: Sequence[bool]) -> list[bool]:
    """Read which layers slide from `layer_types`; `usual` if it is absent."""
    kinds = {"full_attention": False, "sliding_attention": True}
    return read_layer_kinds(config, kinds, len(usual)) or list(usual)


# Names of kinds of layers that transformers 5 reads as newer ones.
OLD_LAYER_KINDS = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def read_layer_kinds(
    config: ConfigReader, kinds: Mapping[str, Kind], count: int, key: str = "layer_types"
) -> list[Kind] | None:
    """Read a list of each layer's kind by its name in `kinds`; None if it is absent.

    Raises:
        CheckpointError: it is no list of `count` kinds.
        UnsupportedModelError: a kind is unknown.
    """
    listed = config.value(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != count:
        raise CheckpointError(
            f"{config.origin}: {config.written(key)} must list as many layers as num_hidden_layers "
            f"says, {count}; take the config.json of its makers"
        )
    listed = [
        OLD_LAYER_KINDS.get(kind, kind) if kind not in kinds else kind for kind in map(str, listed)
    ]
    if any(kind not in kinds for kind in listed):
        raise config.refuse(key, " and ".join(kinds))
    return [kinds[kind] for kind in listed]


def layer_keys(layers: ConfigReader, keys: Iterable[str], count: int) -> dict[int, str]:
    """Return each layer's key by its number; transformers pads the numbers with zeros.

    Raises:
        UnsupportedModelError: a key is no layer's number, or two are the same layer's.
    """
    found: dict[int, str] = {}
    for key in keys:
        number = int(key) if key.isascii() and key.isdigit() else count
        if number >= count:
            raise layers.refuse(key, f"a layer's number below num_hidden_layers = {count}")
        if number in found:
            raise layers.refuse(key, f"one entry a layer, and {found[number]} is the same layer")
        found[number] = key
    return found
