"""Runs an encoder in torch: on a GPU, and on a CPU where the C library cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels import arrays
from appliance.kernels.activation import Activation
from appliance.model.encoder.spec import HeadActivation
from appliance.model.rope import Rope
from appliance.model.tensor_reader import DTYPE_NAMES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.encoder.spec import EncoderLayerSpec, EncoderSpec, RankingSpec
    from appliance.model.encoder.texts import Texts
    from appliance.model.spec import RopeSpec

_FAR = 128  # tokens; all that is farther shares a bucket
_WINDOW_ROWS = 512  # queries that attend at once in a layer with a window
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.SILU: functional.silu,
}
_HEAD_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    HeadActivation.TANH: torch.tanh,
    HeadActivation.GELU: functional.gelu,
    HeadActivation.RELU: functional.relu,
}


@dataclass(frozen=True, slots=True)
class BiasedLinear:
    weight: Tensor  # (rows, columns)
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor  # (hidden_size,)
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderExperts:
    """Experts and their router; see `EncoderExpertsSpec`.

    Attributes:
        router: (count, hidden_size).
        up: (count, intermediate_size, hidden_size), as is `down`, from whose rows it sums.
        bias: (hidden_size,), or None.
    """

    chosen: int
    router: Tensor
    up: Tensor
    down: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        shares = functional.linear(x, self.router).float().softmax(-1)
        largest, experts = shares.topk(self.chosen, -1)
        found = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, place = (experts == expert).nonzero(as_tuple=True)
            inner = act(functional.linear(x[rows], self.up[expert]))
            share = largest[rows, place, None].to(x.dtype)
            found.index_add_(0, rows, inner @ self.down[expert] * share)
        return found if self.bias is None else found + self.bias


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    spec: EncoderLayerSpec
    qkv: BiasedLinear
    attention_out: BiasedLinear
    attention_norm: LayerNorm | None
    mlp: tuple[BiasedLinear, BiasedLinear] | EncoderExperts  # up and down
    mlp_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderHead:
    dense: BiasedLinear
    norm: LayerNorm | None
    classifier: BiasedLinear


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """An encoder with its weights.

    Attributes:
        on_layer: called after each layer.
    """

    spec: EncoderSpec
    tokens: Tensor  # (vocab_size, hidden_size)
    positions: Tensor | None  # (positions, hidden_size)
    token_types: Tensor | None  # (token_types, hidden_size)
    distances: Tensor | None  # (distance_buckets, num_heads)
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    final_norm: LayerNorm | None
    head: EncoderHead | None
    on_layer: Callable[[], None]

    @property
    def ranking(self) -> RankingSpec | None:
        return self.spec.ranking

    @property
    def num_token_types(self) -> int:
        return self.spec.token_types

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def weight_format(self) -> str:
        return DTYPE_NAMES[arrays.dtype_name(self.tokens.dtype)]

    @torch.inference_mode()
    def hidden(self, texts: Texts) -> NDArray[np.float32]:
        """Return the hidden states of all tokens, (num_tokens, hidden_size)."""
        ids, positions = self._put(texts.ids), self._put(texts.positions)
        x = functional.embedding(ids, self.tokens)
        if self.token_types is not None:
            x = x + functional.embedding(self._put(texts.types), self.token_types)
        if self.positions is not None:
            x = x + functional.embedding(positions + self.spec.first_position, self.positions)
        x = self.embedding_norm(x)
        angles, biases = self._angles(positions), self._biases(texts.lengths[-1])
        for layer in self.layers:
            turns = None if layer.spec.rope is None else angles[layer.spec.rope]
            if self.spec.norms_follow:
                assert layer.attention_norm is not None
                x = layer.attention_norm(x + self._attend(layer, x, texts, turns, biases))
                x = layer.mlp_norm(x + self._mlp(layer, x))
            else:
                normed = x if layer.attention_norm is None else layer.attention_norm(x)
                x = x + self._attend(layer, normed, texts, turns, biases)
                x = x + self._mlp(layer, layer.mlp_norm(x))
            self.on_layer()
        return _floats(x if self.final_norm is None else self.final_norm(x))

    @torch.inference_mode()
    def rank(self, chosen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the head's logit of each pair, (num_pairs,).

        Args:
            chosen: (num_pairs, hidden_size), first tokens or means, as the spec has it.
        """
        ranking, head = self.spec.ranking, self.head
        assert ranking is not None
        assert head is not None
        x = self._put(chosen).to(self.tokens.dtype)
        x = _HEAD_ACTIVATIONS[ranking.activation](head.dense(x))
        return _floats(head.classifier(x if head.norm is None else head.norm(x))[:, 0])

    def _put(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _mlp(self, layer: EncoderLayer, x: Tensor) -> Tensor:
        act = _ACTIVATIONS[self.spec.activation]
        if isinstance(layer.mlp, EncoderExperts):
            return layer.mlp(x, act)
        up, down = layer.mlp
        inner = up(x)
        if not self.spec.gated:
            return down(act(inner))
        gate, value = inner.chunk(2, dim=-1)
        if self.spec.gate_last:
            gate, value = value, gate
        return down(act(gate) * value)

    def _attend(
        self,
        layer: EncoderLayer,
        x: Tensor,
        texts: Texts,
        turns: tuple[Tensor, Tensor] | None,
        biases: Tensor | None,
    ) -> Tensor:
        shape = (len(x), 3, self.spec.num_heads, self.spec.head_dim)
        qkv = layer.qkv(x).view(shape)
        if turns is not None:
            qkv = torch.cat([_rotate(qkv[:, :2], *turns), qkv[:, 2:]], 1)
        reach = layer.spec.reach
        seen = attend_by_runs(qkv.unbind(1), texts.lengths, (reach, reach), biases=biases)
        return layer.attention_out(seen.reshape(len(x), self.spec.hidden_size))

    def _angles(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """Return cosines and sines of each rotation, (num_tokens, 1, 1, head_dim / 2)."""
        found = {}
        for spec in {one.spec.rope for one in self.layers} - {None}:
            assert spec is not None
            rope = Rope.of(spec, self.spec.context_length, self.device)
            cos, sin = (part[:, None, None] for part in rope.rotation(positions))
            found[spec] = cos.to(self.tokens.dtype), sin.to(self.tokens.dtype)
        return found

    def _biases(self, longest: int) -> Tensor | None:
        """Return what scores get by distance, (num_heads, 2 * longest - 1); see attend_by_runs."""
        ahead = torch.arange(1 - longest, longest, device=self.device)
        if self.spec.slopes:
            slopes = torch.tensor(head_slopes(self.spec.num_heads), device=self.device)
            return (-slopes[:, None] * ahead.abs()).to(self.tokens.dtype)
        if self.distances is None:
            return None
        return self.distances[distance_bucket(ahead, self.spec.distance_buckets)].T


def _floats(x: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = x.float().cpu().numpy()
    return found


def head_slopes(count: int) -> list[float]:
    """Return ALiBi's slope of each head: a geometric sequence, as its authors' code has it.

    A count that is no power of two takes that of the power below, then every second slope of the
    power above.
    """
    below = 1 << (count.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes if below == count else slopes + head_slopes(2 * below)[::2][: count - below]


def distance_bucket(ahead: Tensor, count: int) -> Tensor:
    """Return the bucket of each distance, as T5 has it (arXiv 1910.10683, 2.1).

    Half of the `count` buckets are for keys behind their query. Of each half, half again is for one
    distance each, and the rest grows by a factor up to 128 tokens.
    """
    half, exact = count // 2, count // 4
    far = ahead.abs()
    grown = torch.log(far.clamp(min=1).float() / exact) / math.log(_FAR / exact) * (half - exact)
    within = torch.where(far < exact, far, (exact + grown.long()).clamp(max=half - 1))
    return within + (ahead > 0) * half


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of elements half a head apart."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend_by_runs(
    qkv: Sequence[Tensor],
    lengths: Sequence[int],
    reach: tuple[int | None, int | None],
    scale: float | None = None,
    softcap: float | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Attend within each text; texts of one length that follow one another run at once.

    Args:
        qkv: (num_tokens, heads, head_dim) each; groups of queries may share keys and values.
        lengths: tokens of each text.
        reach: positions before and after its own that a query sees; None for all.
        scale: multiplies q . k; None is 1 / sqrt(head_dim).
        softcap: scores become cap * tanh(scores / cap).
        biases: added to scores, (heads, 2 * n - 1) for texts up to n tokens: element n - 1 + d for
            a key that lies d behind its query.

    Returns:
        (num_tokens, heads, head_dim) of the queries.
    """
    parts, begin = [], 0
    for length, run in groupby(lengths):
        count = len([*run])
        end = begin + count * length
        # (count, heads, length, head_dim)
        q, k, v = (
            one[begin:end].view(count, length, *one.shape[1:]).transpose(1, 2) for one in qkv
        )
        seen = _attention(q, k, v, reach, scale, softcap, biases)
        parts.append(seen.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(parts)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: tuple[int | None, int | None],
    scale: float | None,
    softcap: float | None,
    biases: Tensor | None,
) -> Tensor:
    """Attend within each text, (count, heads, length, head_dim)."""
    length, shared = q.shape[2], q.shape[1] != k.shape[1]
    before, after = (length if each is None else each for each in reach)
    if min(before, after) >= length - 1 and softcap is None and biases is None:
        return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=shared)
    parts = []
    for begin in range(0, length, _WINDOW_ROWS):
        end = min(begin + _WINDOW_ROWS, length)
        first, last = max(begin - before, 0), min(end + after, length)
        rows = torch.arange(begin, end, device=q.device)[:, None]
        ahead = torch.arange(first, last, device=q.device) - rows
        near = (ahead >= -before) & (ahead <= after)
        own = (q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last])
        if softcap is not None:
            parts.append(_capped(*own, near, scale, softcap))
            continue
        if biases is not None:
            added = biases[:, ahead + biases.shape[1] // 2]
            near = added.masked_fill(~near, -torch.inf)
        parts.append(
            functional.scaled_dot_product_attention(
                *own, attn_mask=near, scale=scale, enable_gqa=shared
            )
        )
    return torch.cat(parts, 2)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, near: Tensor, scale: float | None, softcap: float
) -> Tensor:
    """Attend with capped scores; `near` (queries, keys) is True where a query sees a key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v
