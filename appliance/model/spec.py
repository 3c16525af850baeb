"""A decoder as plain frozen data: its arithmetic layer by layer, without implementation.

Two executors read it: the torch decoder and the CPU library. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from appliance.model.recurrent_spec import RecurrentSpec

if TYPE_CHECKING:
    from appliance.kernels.activation import Activation, Gating
    from appliance.kernels.routing import Router

STATE_ALIGNMENT = 64  # bytes, between tensors of a state slot


class RopeScaling(Enum):
    """Method that stretches rotary frequencies beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"
    YARN = "yarn"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, halves convention: element i pairs with i + rotary_dim / 2.

    With `query_beta` rotated queries are multiplied by
    1 + query_beta * log(1 + floor(position / original_context)), as in Llama 4 and Ministral 3.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0  # LLAMA3
    original_context: int = 0  # LLAMA3, LONGROPE, YARN
    short_factors: tuple[float, ...] = ()  # LONGROPE, rotary_dim / 2 values
    long_factors: tuple[float, ...] = ()  # LONGROPE
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    truncate: bool = True  # YARN: the blended range begins and ends at whole dimensions
    turning: int = 0  # PROPORTIONAL: pairs that turn, the first ones of all
    query_beta: float = 0.0  # needs original_context


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * (weight + offset).

    With `centered` it is LayerNorm: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
    """

    eps: float
    offset: float = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k
    rope: RopeSpec
    window: int | None = None  # a query sees this many latest positions, its own included
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None  # per head, before RoPE
    output_gate: bool = False  # the query linear also yields gates of the heads' output
    sinks: bool = False  # each head has a score in the softmax that belongs to no token
    value_norm: NormSpec | None = None  # per head, without a weight
    keys_are_values: bool = False  # values are the keys before their norm and RoPE
    kv_layer: int | None = None  # whose keys and values it reads; None: it has its own


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention of one layer (MLA, arXiv 2405.04434).

    Keys and values of all heads are linear in one latent of a token, but for a part of the key that
    rotates and is the same for all heads. The cache holds the latent and that part, nothing else.

    Attributes:
        query_rank: elements that query heads are made of, under a norm; None makes them at once.
        latent: elements of a latent.
        plain_dim: elements of a head's key that do not rotate.
        rope_dim: elements that do.
        value_dim: elements of a head's value.
        norm: of latents, and of what queries are made of.
        bias: of the first linears and of the last.
        interleaved: the checkpoint holds what rotates as pairs.
    """

    num_heads: int
    query_rank: int | None
    latent: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # multiplies q . k
    rope: RopeSpec
    norm: NormSpec
    bias: bool = False
    interleaved: bool = True

    @property
    def width(self) -> int:
        """Elements that the cache holds of a token."""
        return self.latent + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.plain_dim + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """1: a token lies in the cache in two halves, as keys and values of one head would."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of such a half."""
        return self.width // 2


CachedSpec: TypeAlias = AttentionSpec | LatentAttentionSpec
MixerSpec: TypeAlias = CachedSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """MLP of one layer: down(act(gate(x)) * up(x)), or without gate down(act(up(x)))."""

    intermediate_size: int
    activation: Gating
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """MLPs of one layer, of which a router chooses some for each token.

    With norms of its own (Gemma 4) the router reads norm(stream) and the experts another norm of
    it, instead of what the layer's norm leaves for `shared`; a norm follows on what `shared` says,
    and one on what the experts say, before they are added up.

    Attributes:
        intermediate_size: of each expert.
        shared: an MLP beside them that sees every token.
        shared_gate: the shared MLP's output is multiplied by the sigmoid of one more linear.
        bias: the experts' linears have biases.
        own_norms: see above.
        gated: as in `MLPSpec`; the shared MLP says so itself.
    """

    intermediate_size: int
    activation: Gating
    router: Router
    shared: MLPSpec | None = None
    shared_gate: bool = False
    bias: bool = False
    own_norms: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += mixer(norm(x)); x += mlp(norm(x)), with optional norms after each.

    A mixer brings positions together: attention through the KV cache, others through a state.
    Either may be missing (Nemotron-H), and its norms with it.

    Attributes:
        post_norms: Gemma: norm the output of mixer and MLP before adding.
        output_scale: the checkpoint has a factor of the stream after the layer.
        parallel: x += mixer(norm(x)) + mlp(norm(x)), with a norm each (Falcon).
        one_norm: of parallel mixer and MLP.
        joins: attention reads both halves of a join, 2 * hidden elements, instead of norm(x).
    """

    mixer: MixerSpec | None
    mlp: MLPSpec | ExpertsSpec | None
    norm: NormSpec
    post_norms: bool = False
    output_scale: bool = False
    parallel: bool = False
    one_norm: bool = False
    joins: bool = False


@dataclass(frozen=True, slots=True)
class TokenInputSpec:
    """Embeddings of the token itself for each layer, added to the stream after it (Gemma).

    Of all layers: input = (norm(x @ projection / sqrt(hidden)) + embedding * sqrt(width)) / sqrt(2)
    with the stream x before the first layer. After a layer:
    stream += norm(up(act(gate(stream)) * input)).

    Attributes:
        width: of a layer's input.
        vocab_size: rows of the embedding.
    """

    width: int
    vocab_size: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Learned embeddings of positions, added to those of tokens.

    Attributes:
        count: of positions.
        skipped: rows of the checkpoint's table before that of position 0.
    """

    count: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder-only model.

    Attributes:
        architecture: family name, for people.
        norms_replace: a norm follows each addition to the stream and takes its place, as in the
            first Transformer; there is none before the first layer, and none of the decoder.
        embedding_width: of the matrix of embeddings, which linears bring to `hidden_size` and back
            before the head; None is `hidden_size` without them.
        read_tokens: that have an embedding, where it says fewer; None is `vocab_size`.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_head: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0  # multiplies the logits
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)
    token_input: TokenInputSpec | None = None
    positions: PositionSpec | None = None
    norms_replace: bool = False
    embedding_width: int | None = None
    read_tokens: int | None = None

    @property
    def num_embedded(self) -> int:
        """Tokens that it can read."""
        return self.read_tokens or self.vocab_size

    @property
    def has_experts(self) -> bool:
        """True if some layer chooses experts."""
        return self.router is not None

    @property
    def router(self) -> Router | None:
        """The first router; None without experts."""
        mlps = (layer.mlp for layer in self.layers)
        return next((mlp.router for mlp in mlps if isinstance(mlp, ExpertsSpec)), None)

    @property
    def goes_layer_by_layer(self) -> bool:
        """True if a layer needs nothing but the stream and its own cache.

        And if the stream before the first one is rows of the embedding.
        """
        mixers = self.attention_layers.values()
        from_embedding = self.positions is None and self.embedding_width is None
        own_inputs = self.token_input is None and all(mixer.kv_layer is None for mixer in mixers)
        return own_inputs and from_embedding and not self.norms_replace

    @property
    def attention_layers(self) -> dict[int, AttentionSpec]:
        """Layers that attend, by their index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, AttentionSpec)}

    @property
    def recurrent_layers(self) -> dict[int, RecurrentSpec]:
        """Layers with a state, by their index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, RecurrentSpec)}

    @property
    def latent_layers(self) -> dict[int, LatentAttentionSpec]:
        """Layers with latent attention, by their index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, LatentAttentionSpec)}

    @property
    def cache_layers(self) -> dict[int, CachedSpec]:
        """Layers that have a KV cache of their own, by their index, in order."""
        mixers = self.attention_layers.items()
        own = {index: mixer for index, mixer in mixers if mixer.kv_layer is None}
        found: dict[int, CachedSpec] = {**own, **self.latent_layers}
        return dict(sorted(found.items()))

    @property
    def cache_places(self) -> dict[int, int]:
        """The place of each layer's cache among `cache_layers`, or among recurrent layers.

        Layers without a mixer have none.
        """
        places = {index: place for place, index in enumerate(self.cache_layers)}
        places |= {index: place for place, index in enumerate(self.state_offsets)}
        for index, mixer in self.attention_layers.items():
            if mixer.kv_layer is not None:
                places[index] = places[mixer.kv_layer]
        return places

    @property
    def state_offsets(self) -> dict[int, tuple[int, ...]]:
        """Offsets in bytes of each recurrent layer's tensors in a state slot, by its index."""
        offsets: dict[int, tuple[int, ...]] = {}
        end = 0
        for index, mixer in self.recurrent_layers.items():
            ends = list(accumulate(map(_state_bytes, mixer.state), initial=end))
            offsets[index], end = tuple(ends[:-1]), ends[-1]
        return offsets

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all layers; 0 without recurrent layers."""
        mixers = self.recurrent_layers.values()
        return sum(_state_bytes(shape) for mixer in mixers for shape in mixer.state)


def _state_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a float32 tensor, up to a multiple of `STATE_ALIGNMENT`."""
    return -(-4 * prod(shape) // STATE_ALIGNMENT) * STATE_ALIGNMENT
