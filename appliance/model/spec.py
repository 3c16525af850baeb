"""A decoder as plain frozen data: its arithmetic layer by layer, without implementation.

Two executors read it: the torch decoder and the CPU library. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.head_norms import HeadNormKind
from appliance.model.recurrent_spec import OwnCacheSpec, RecurrentSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

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


class AxisFrequencies(Enum):
    """Frequencies of the axes of a rope with `sections`."""

    IN_TURN = "in_turn"  # each section goes on where the one before ends
    EACH = "each"  # each section has all, as if it were alone
    EVERY_OTHER = "every_other"  # two axes take turns


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding by halves: element i pairs with i + rotary_dim / 2.

    With `query_beta`, rotated queries are multiplied by 1 + query_beta * log(1 + floor((position +
    query_shift) / original_context)), as in Llama 4 and Ministral 3.

    With `sections`, a row has a position in time, height and width, and each frequency rotates by
    one of them (M-RoPE, arXiv 2409.12191): so many frequencies by each. Text has one position.
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
    truncate: bool = True  # YARN: round the blended range to whole dimensions
    turning: int = 0  # PROPORTIONAL: number of first pairs that rotate
    query_beta: float = 0.0  # needs original_context
    query_shift: int = 0
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False  # sections: the axes take turns, as in Qwen3-VL; else one by one
    axis_frequencies: AxisFrequencies = AxisFrequencies.IN_TURN

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each frequency: 0 time, 1 height, 2 width; empty without sections.

        Interleaved, height and width take every third frequency until they have theirs, and time
        the others.
        """
        if self.sections is None:
            return ()
        if not self.interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        ends = [3 * count for count in self.sections]
        turns = (index % 3 for index in range(self.rotary_dim // 2))
        return tuple(axis if index < ends[axis] else 0 for index, axis in enumerate(turns))


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * (weight + offset).

    With `centered`, LayerNorm: (x - mean(x)) / sqrt(variance(x) + eps) * (weight + offset) + bias.
    """

    eps: float
    offset: float = 0.0
    centered: bool = False
    bias: bool = True  # of a centered norm
    weight: bool = True  # the checkpoint has one; else it is 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k
    rope: RopeSpec
    window: int | None = None  # a query reads this many latest positions, its own included
    chunk: int | None = None  # it reads its chunk of so many positions, up to its own
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None  # of queries and keys
    head_norms: HeadNormKind = HeadNormKind.EACH
    output_gate: bool = False  # the query linear also computes gates of the heads' output
    head_gates: bool = False  # another linear computes a gate of each head's whole output
    sinks: bool = False  # each head's softmax has a learned extra score
    value_norm: NormSpec | None = None  # per head, without a weight
    keys_are_values: bool = False  # values are the keys before norm and RoPE
    kv_layer: int | None = None  # layer whose keys and values it reads; None: its own
    looks_ahead: bool = False  # a query reads as many following positions; only without a cache
    sees_picture: bool = False  # a picture's row reads all rows of its picture in the window

    @property
    def row_floats(self) -> int:
        """A row's floats in a step: outputs of its linears and of its operation."""
        return (self.num_heads * 2 + self.num_kv_heads * 2) * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention of one layer (MLA, arXiv 2405.04434).

    Keys and values of all heads are linear in one latent per token, except a rotated part of the
    key that all heads share. The cache holds only the latent and that part.

    Attributes:
        query_rank: width of the query latent, which is normed; None without one.
        plain_dim: elements of a head's key that do not rotate.
        rope_dim: elements that rotate.
        norm: of both latents.
        bias: of the first linears and the last.
        interleaved: the checkpoint stores rotated rows as pairs.
        chosen: an indexer chooses so many positions for a query to see. It is not run: contexts
            end where it would leave out the first.
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
    chosen: int | None = None

    @property
    def width(self) -> int:
        """Cached elements per token."""
        return self.latent + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """1: the cache stores a token in two halves, as keys and values of one head."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of each half."""
        return self.width // 2

    @property
    def row_floats(self) -> int:
        """A row's floats in a step: outputs of its linears and of its operation."""
        heads = self.query_dim + 2 * self.width + self.latent + self.value_dim
        return self.num_heads * heads + (self.query_rank or 0) + 2 * self.width


CachedSpec: TypeAlias = AttentionSpec | LatentAttentionSpec
MixerSpec: TypeAlias = CachedSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """MLP of one layer: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    intermediate_size: int
    activation: Gating
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """MLPs of one layer, some of which a router chooses per token.

    With `own_norms` (Gemma 4), the router reads norm(stream) and the experts another norm of it,
    while `shared` reads the layer's norm; the outputs of `shared` and of the experts are each
    normed before they are added.

    Attributes:
        shared: an MLP that every token passes through as well.
        shared_gate: the sigmoid of another linear multiplies the shared MLP's output.
        gated: as in `MLPSpec`; for the shared MLP, see its own spec.
        held: numbers of the experts in a rank's part of the model; None: all of them.
        latent: elements that each expert reads and says, if a linear maps the layer's norm to them
            and another maps their sum back (Nemotron 3 Super); None: `hidden_size`.
        weighs_inputs: the router's weights multiply what experts read, not what they say.
    """

    intermediate_size: int
    activation: Gating
    router: Router
    shared: MLPSpec | None = None
    shared_gate: bool = False
    bias: bool = False
    own_norms: bool = False
    gated: bool = True
    held: range | None = None
    latent: int | None = None
    weighs_inputs: bool = False

    @property
    def experts(self) -> range:
        """Numbers of the experts that are here."""
        return range(self.router.num_experts) if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += mixer(norm(x)); x += mlp(norm(x)), with optional norms after each.

    A mixer combines positions: attention through the KV cache, others through a state. Mixer or MLP
    may be missing with its norms (Nemotron-H).

    Attributes:
        pre_norms: norm what mixer and MLP read; without, x += norm(mixer(x)) (OLMo 2).
        post_norms: norm the output of mixer and MLP before adding it (Gemma).
        output_scale: the checkpoint has a factor of the stream after the layer.
        parallel: x += mixer(norm(x)) + mlp(norm(x)), with a norm each (Falcon).
        one_norm: parallel mixer and MLP share a norm.
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
    pre_norms: bool = True


@dataclass(frozen=True, slots=True)
class TokenInputSpec:
    """Token embeddings for each layer, added to the stream after it (Gemma).

    All layers: input = (norm(x @ projection / sqrt(hidden)) + embedding * sqrt(width)) / sqrt(2),
    with the stream x before the first layer. After a layer: stream += norm(up(act(gate(stream)) *
    input)).

    Attributes:
        width: of a layer's input.
    """

    width: int
    vocab_size: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Learned position embeddings, added to the tokens'.

    Attributes:
        skipped: rows of the checkpoint's table before position 0.
    """

    count: int
    skipped: int = 0


class HeadNorm(Enum):
    """Vectors of the head that are divided by their length, once for all tokens."""

    ROWS = "rows"  # of each token (Baichuan 2)
    COLUMNS = "columns"  # of each element of the stream (Ling 1)


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """A linear of one row that judges a text, as transformers' `...ForSequenceClassification`.

    logit = score(x) / temperature, where x is the state of the last token that is not `padding`.

    Attributes:
        mean: x is the mean of all states instead.
        padding: id of a token that counts as none; None if all count.
    """

    mean: bool = False
    padding: int | None = None
    temperature: float = 1.0

    def judged(self, hidden: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the state (hidden_size,) that is judged, of a text's (num_tokens, hidden_size)."""
        if self.mean:
            mean: NDArray[np.float32] = hidden.mean(0)
            return mean
        counting = (place for place in reversed(range(len(ids))) if ids[place] != self.padding)
        chosen: NDArray[np.float32] = hidden[next(counting, 0)]
        return chosen


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder-only model.

    Attributes:
        norms_replace: each addition to the stream is followed by a norm that replaces it, as in the
            first Transformer, with no norm before the first layer or after the last.
        embedding_width: of the embedding matrix, if linears map it to `hidden_size` and back before
            the head; else None.
        read_tokens: number of tokens with an embedding, if the head predicts fewer; None is
            `vocab_size`.
        head_norm: what of the stored head is divided by its length.
        head_bias: the checkpoint has a bias of the logits, before `logit_scale`.
        score: judges texts, of a decoder that only reads.
        own_cache: of a class of transformers whose layers are not described, so that each sequence
            has a cache of that class instead of the engine's blocks and states.
        state_format: of what recurrent layers keep between steps.
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
    head_norm: HeadNorm | None = None
    head_bias: bool = False
    score: ScoreSpec | None = None
    own_cache: OwnCacheSpec | None = None
    state_format: StateFormat = StateFormat.FP32

    @property
    def has_axes(self) -> bool:
        """True if rows rotate by positions in time, height and width; see `RopeSpec.sections`."""
        mixers = self.attention_layers.values()
        return any(mixer.rope.sections is not None for mixer in mixers)

    @property
    def num_embedded(self) -> int:
        return self.read_tokens or self.vocab_size

    @property
    def sees_pictures(self) -> bool:
        """True if rows of a picture see those of their picture behind them, in some layers."""
        return any(mixer.sees_picture for mixer in self.attention_layers.values())

    @property
    def has_experts(self) -> bool:
        return self.router is not None

    @property
    def router(self) -> Router | None:
        """The first router; None without experts."""
        mlps = (layer.mlp for layer in self.layers)
        return next((mlp.router for mlp in mlps if isinstance(mlp, ExpertsSpec)), None)

    @property
    def goes_layer_by_layer(self) -> bool:
        """True if layers need only a stream, which they norm first, and their own caches."""
        mixers = self.attention_layers.values()
        from_embedding = self.positions is None and self.embedding_width is None
        own_inputs = self.token_input is None and all(mixer.kv_layer is None for mixer in mixers)
        normed = not self.norms_replace and all(layer.pre_norms for layer in self.layers)
        return own_inputs and from_embedding and normed

    @property
    def attention_layers(self) -> dict[int, AttentionSpec]:
        """Layers with grouped-query attention, by index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, AttentionSpec)}

    @property
    def recurrent_layers(self) -> dict[int, RecurrentSpec]:
        """Layers with a state, by index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, RecurrentSpec)}

    @property
    def latent_layers(self) -> dict[int, LatentAttentionSpec]:
        """Layers with latent attention, by index, in order."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, LatentAttentionSpec)}

    @property
    def chunks(self) -> tuple[int, ...]:
        """Distinct chunks of positions that layers attend within."""
        mixers = self.attention_layers.values()
        return tuple(dict.fromkeys(mixer.chunk for mixer in mixers if mixer.chunk is not None))

    def for_context(self, length: int) -> DecoderSpec:
        """Return a decoder without chunks that no sequence of up to `length` tokens leaves."""

        def of_layer(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            if not isinstance(mixer, AttentionSpec) or (mixer.chunk or 0) < length:
                return layer
            return replace(layer, mixer=replace(mixer, chunk=None))

        return replace(self, layers=tuple(map(of_layer, self.layers))) if self.chunks else self

    @property
    def cache_layers(self) -> dict[int, CachedSpec]:
        """Layers with their own KV cache, by index, in order."""
        mixers = self.attention_layers.items()
        own = {index: mixer for index, mixer in mixers if mixer.kv_layer is None}
        found: dict[int, CachedSpec] = {**own, **self.latent_layers}
        return dict(sorted(found.items()))

    @property
    def cache_places(self) -> dict[int, int]:
        """Index of each layer's cache in `cache_layers`, or among recurrent layers.

        Layers without a mixer are left out.
        """
        places = {index: place for place, index in enumerate(self.cache_layers)}
        places |= {index: place for place, index in enumerate(self.state_offsets)}
        for index, mixer in self.attention_layers.items():
            if mixer.kv_layer is not None:
                places[index] = places[mixer.kv_layer]
        return places

    @property
    def state_offsets(self) -> dict[int, tuple[int, ...]]:
        """Byte offsets of each recurrent layer's tensors in a state slot, by index."""
        offsets: dict[int, tuple[int, ...]] = {}
        end = 0
        for index, mixer in self.recurrent_layers.items():
            ends = list(accumulate(map(self._state_bytes, mixer.state), initial=end))
            offsets[index], end = tuple(ends[:-1]), ends[-1]
        return offsets

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all layers; 0 without recurrent layers."""
        if self.own_cache is not None:
            return self.own_cache.wide.fixed_bytes
        mixers = self.recurrent_layers.values()
        return sum(self._state_bytes(shape) for mixer in mixers for shape in mixer.state)

    def _state_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a kept tensor, rounded up to `STATE_ALIGNMENT`."""
        num_bytes = self.state_format.num_bytes * prod(shape)
        return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
