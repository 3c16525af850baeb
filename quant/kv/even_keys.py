"""Evens out key channels, so that one scale fits a token's whole key.

A score sums query times key over channels, so dividing a key channel and multiplying its query
channel by one factor changes nothing. The factors go into the weights of queries and keys: they
cost nothing at run time and work in every reader. The two channels that RoPE rotates together share
a factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.arrays import in_torch
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.weights.weight import dense
from appliance.model.row_orders import head_rows
from appliance.quant.walk.pieces import ReadsRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.spec import AttentionSpec
    from appliance.quant.formats import WeightReader
    from appliance.quant.formats.kv_plan import KVLayer

    Row = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of one row of text
    ErrorOf = Callable[[LayerPrecision, Sequence[Row]], float]

# Exponents of a channel's largest centred key and of its queries' root mean square. The first tells
# how far the channel stretches the shared scale, the second how much its own errors matter.
TRIED = ((0.5, 0.0), (0.7, 0.0), (0.7, 0.25), (0.85, 0.25))
LEAST_GAIN = 0.9  # use factors if less than this share of the error is left


def choose_factors(
    spec: AttentionSpec, rows: Sequence[Row], every_key: Tensor, error: ErrorOf
) -> Tensor | None:
    """Choose factors to divide a layer's keys by, for the least error with INT8 keys.

    Args:
        rows: rows of text to measure on.
        every_key: (tokens, num_kv_heads, head_dim) float32 of all rows, after RoPE.
        error: returns the error of a cache precision on rows.

    Returns:
        (num_kv_heads, head_dim) float32; None if nothing is gained, or if a norm of queries and
        keys follows, whose weight all heads share.
    """
    if spec.qk_norm is not None:
        return None
    mean = every_key.mean(0)
    centre = None if spec.softcap is not None else mean
    plain = [LayerPrecision(KVFormat.INT8), LayerPrecision(KVFormat.INT8, key_mean=centre)]
    least = LEAST_GAIN * min(error(precision, rows) for precision in plain)
    best = None
    largest = _of_pairs((every_key - mean).abs().amax(0), spec)
    queries = torch.cat([row[0] for row in rows]).square().mean(0)
    power = _of_pairs(queries.unflatten(0, (spec.num_kv_heads, -1)).mean(1), spec).sqrt()
    for of_largest, of_power in TRIED:
        factors = largest.pow(of_largest) * power.pow(-of_power)
        factors = factors / factors.log().mean(-1, keepdim=True).exp()
        off = None if centre is None else centre / factors
        found = error(LayerPrecision(KVFormat.INT8, key_mean=off), even(rows, factors))
        if found < least:
            best, least = factors, found
    return best


def even(rows: Sequence[Row], factors: Tensor) -> list[Row]:
    """Divide keys by the factors and multiply queries by them."""
    return [
        (query * factors.repeat_interleave(query.shape[1] // len(factors), 0), key / factors, value)
        for query, key, value in rows
    ]


def _of_pairs(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the larger of each pair that RoPE rotates, (num_kv_heads, head_dim)."""
    half = spec.rope.rotary_dim // 2
    larger = torch.maximum(x[:, :half], x[:, half : 2 * half])
    return torch.cat((larger, larger, x[:, 2 * half :]), dim=-1).clamp_min(1e-6)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A `WeightReader` that scales rows of some dense tensors.

    Attributes:
        factors: one factor per row, by tensor name.
    """

    weights: WeightReader
    factors: Mapping[str, Tensor]

    def tensor_names(self) -> list[str]:
        return self.weights.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        return None if name in self.factors else self.weights.packed_bits(name)

    def group_size(self, name: str) -> int | None:
        return None if name in self.factors else self.weights.group_size(name)

    def float_bits(self, name: str) -> int | None:
        return None if name in self.factors else self.weights.float_bits(name)

    def load(self, name: str) -> Weight:
        return self._scaled(name, self.weights.load(name), slice(None))

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        assert isinstance(self.weights, ReadsRows)
        return self._scaled(name, self.weights.load_rows(name, start, stop), slice(start, stop))

    def notes(self) -> tuple[str, ...]:
        return self.weights.notes()

    def _scaled(self, name: str, value: Weight, rows: slice) -> Weight:
        if name not in self.factors:
            return value
        full = dense(value, torch.float32)
        return full * self.factors[name][rows].view(-1, *[1] * (full.dim() - 1))


def with_even_keys(source: ModelSource, layers: Sequence[KVLayer]) -> ModelSource:
    """Return the model with a plan's factors multiplied into its weights."""
    factors = {
        name: rows
        for index, layer in enumerate(layers)
        if layer.key_factors is not None
        for name, rows in _row_factors(source, index, in_torch(layer.key_factors))
    }
    if not factors:
        return source
    assert isinstance(source.weights, ReadsRows), "what is packed already is not quantized"
    return replace(source, weights=ScaledRows(source.weights, factors))


def _row_factors(source: ModelSource, index: int, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that produce queries and keys, with a factor per row."""
    attention, names = source.spec.attention_layers[index], source.family.names
    queries = factors.repeat_interleave(attention.num_heads // attention.num_kv_heads, 0)
    values = torch.ones_like(factors)
    every = torch.cat((queries, 1 / factors, values)).flatten()
    start = 0
    for place, part in enumerate(names.qkv):
        name = names.in_layer(index, part)
        rows = source.weights.shape(f"{name}.weight")[0]
        of_part = every[start : start + rows]
        start += rows
        order = head_rows(attention, names, place)
        if order is not None:  # of the stored rows
            of_part = of_part[torch.from_numpy(order.argsort())]
        if bool((of_part != 1).any()):
            yield f"{name}.weight", of_part
            if attention.qkv_bias:
                yield f"{name}.bias", of_part
