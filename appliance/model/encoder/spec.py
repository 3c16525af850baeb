"""An encoder as plain frozen data: arithmetic and names of tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from appliance.kernels.activation import Activation
    from appliance.model.spec import RopeSpec


class HeadActivation(Enum):
    """The nonlinearity of a ranking head."""

    TANH = "tanh"
    GELU = "gelu"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class RankingSpec:
    """A head that judges a pair of texts by one number.

    logit = classifier(norm(act(dense(x)))), where x is the first token's hidden state.

    Attributes:
        mean: x is the mean of all hidden states instead.
        normed: a norm follows the activation.
        bias: of `dense`.
    """

    activation: HeadActivation
    mean: bool = False
    normed: bool = False
    bias: bool = True

    def judged(self, hidden: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the state (hidden_size,) that is judged, of a text's (num_tokens, hidden_size)."""
        found: NDArray[np.float32] = hidden.mean(0) if self.mean else hidden[0]
        return found


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """The settings that layers may differ in.

    Attributes:
        reach: positions on each side that a token sees; None for all.
        rope: None without rotation.
        attention_norm: a norm stands before attention, or after it if norms follow.
        routed: experts are in place of the MLP.
    """

    reach: int | None = None
    rope: RopeSpec | None = None
    attention_norm: bool = True
    routed: bool = False


@dataclass(frozen=True, slots=True)
class EncoderExpertsSpec:
    """MLPs without gates or own biases, of which a router chooses some for each token.

    y = sum(p[e] * down[e](act(up[e](x))) for the `chosen` largest p) + bias, with p the softmax of
    the router's logits over all experts.

    Attributes:
        bias: of the sum.
    """

    count: int
    chosen: int
    bias: bool = True


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder.

    Attributes:
        architecture: family name, for people.
        context_length: most tokens of a text, special ones included.
        positions: rows of the table of learned positions; 0 without one.
        first_position: row of a text's first token.
        token_types: rows of the table that tells the two texts of a pair apart; 0 without one.
        distance_buckets: rows of a table of what is added to scores, for each head, by how far and
            in which direction a key lies from its query; 0 without one. See `distance_bucket`.
        slopes: scores of a head fall by its slope with each position between query and key (ALiBi,
            arXiv 2108.12409), to both sides.
        norms_follow: x = norm(x + f(x)), as in the first Transformer; else x += f(norm(x)), with a
            norm after the last layer.
        gated: down(act(a) * b) for (a, b) = up(x), instead of down(act(up(x))).
        gate_last: b comes before a.
        norm_bias: norms have one; so do linears with `attention_bias`, `up_bias`, `down_bias`.
        experts: of the layers that are routed.
        ranking: None without a head.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    norm_eps: float
    layers: tuple[EncoderLayerSpec, ...]
    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    distance_buckets: int = 0
    slopes: bool = False
    norms_follow: bool = True
    gated: bool = False
    gate_last: bool = False
    norm_bias: bool = True
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    experts: EncoderExpertsSpec | None = None
    ranking: RankingSpec | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of a family's tensors, without `.weight` and `.bias`; those of a layer after its own.

    Attributes:
        prefixes: before all but the head; the one that a checkpoint uses is found by its tensors.
        qkv: one name, or those of queries, keys and values; likewise `up` of both its parts.
        router: and the next three name the parts of experts; all are in full but for `.weight`.
        experts_apart: stacks of experts have a dimension of their own, and `expert_down` the width
            of the stream before the inner one, as in GGUF files; else experts' rows follow one
            another, and both have the width of the stream last.
        unused: beginnings of the names of tensors that embedding and ranking do not need.
    """

    prefixes: tuple[str, ...]
    tokens: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    attention_out: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    dense: str
    classifier: str
    positions: str = ""
    token_types: str = ""
    distances: str = ""
    final_norm: str = ""
    head_norm: str = ""
    router: str = ""
    expert_up: str = ""
    expert_down: str = ""
    expert_bias: str = ""
    experts_apart: bool = False
    unused: tuple[str, ...] = field(default=())


def encoder_slots(
    spec: EncoderSpec, names: EncoderNames, prefix: str
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that is read."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    slots: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        slots[f"{name}.weight"] = (rows, columns)
        if bias:
            slots[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        slots[f"{name}.weight"] = (hidden,)
        if spec.norm_bias:
            slots[f"{name}.bias"] = (hidden,)

    slots[f"{prefix}{names.tokens}.weight"] = (spec.vocab_size, hidden)
    if spec.positions:
        slots[f"{prefix}{names.positions}.weight"] = (spec.positions, hidden)
    if spec.token_types:
        slots[f"{prefix}{names.token_types}.weight"] = (spec.token_types, hidden)
    if spec.distance_buckets:
        slots[f"{prefix}{names.distances}.weight"] = (spec.distance_buckets, spec.num_heads)
    norm(prefix + names.embedding_norm)
    for index, layer in enumerate(spec.layers):
        own = f"{prefix}{names.layer.format(index)}."
        for name in names.qkv:
            linear(own + name, 3 * hidden // len(names.qkv), hidden, spec.attention_bias)
        linear(own + names.attention_out, hidden, hidden, spec.attention_bias)
        if layer.attention_norm:
            norm(own + names.attention_norm)
        if layer.routed and (experts := spec.experts) is not None:
            count, apart = experts.count, names.experts_apart
            slots[f"{own}{names.router}.weight"] = (count, hidden)
            flat = (count * inner, hidden)
            slots[own + names.expert_up] = (count, inner, hidden) if apart else flat
            slots[own + names.expert_down] = (count, hidden, inner) if apart else flat
            if experts.bias:
                slots[own + names.expert_bias] = (hidden,)
            norm(own + names.mlp_norm)
            continue
        for name in names.up:
            rows = inner * (2 if spec.gated else 1) // len(names.up)
            linear(own + name, rows, hidden, spec.up_bias)
        linear(own + names.down, hidden, inner, spec.down_bias)
        norm(own + names.mlp_norm)
    if not spec.norms_follow:
        norm(prefix + names.final_norm)
    if spec.ranking is not None:
        # BERT's pooler belongs to the encoder, its classifier does not.
        linear(names.dense.format(prefix), hidden, hidden, spec.ranking.bias)
        if spec.ranking.normed:
            norm(names.head_norm)
        linear(names.classifier, 1, hidden, True)
    return slots
