"""Measures what each KV format costs a layer.

The rows pass once through the unquantized layers. Each layer's keys, values and queries give FP8
scales per head, the mean key and, per format, the error of attention after the output projection,
as a share of the residual stream's energy, which makes layers comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_format import KVFormat, LayerPrecision
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.quant.formats.kv_plan import KVLayer
from appliance.quant.kv.attention import (
    EVERY,
    AttentionWatch,
    attend_with,
    largest_scales,
    search_scales,
)
from appliance.quant.kv.even_keys import choose_factors, even
from appliance.quant.walk.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.model.spec import AttentionSpec
    from appliance.quant.kv.even_keys import Row
    from appliance.quant.walk.block import TransformerBlock


MEASURED = (
    KVFormat.INT4_SEALED,
    KVFormat.K8V4,
    KVFormat.INT8,
    KVFormat.BF16,
    KVFormat.FP8,
    KVFormat.INT4,
)
ROWS = 2  # rows that errors are measured on; scales and means use all
LEAST_GAIN = 0.9  # subtract the mean key if less than this share of the error is left


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One layer's measured scales, mean keys and errors.

    Attributes:
        head_scales: (2, num_kv_heads) float32 FP8 scales of plain keys and of values.
        centred_scales: same, of keys without their mean.
        key_mean: (num_kv_heads, head_dim) float32.
        errors: with plain keys, by format.
        centred: with the mean subtracted, by format; empty if not supported.
        num_elements: numbers in one token's keys and values.
        bits: per element, by format.
        key_factors: (num_kv_heads, head_dim) float32 that all of this divides keys by, or None; see
            `even_keys`.
    """

    head_scales: Tensor
    centred_scales: Tensor
    key_mean: Tensor
    errors: dict[KVFormat, float]
    centred: dict[KVFormat, float]
    num_elements: int
    bits: dict[KVFormat, float]
    key_factors: Tensor | None = None

    def best(self, format: KVFormat) -> float:
        """Return the format's error, with the mean subtracted if that gains enough."""
        return self.centred[format] if self.gains(format) else self.errors[format]

    def gains(self, format: KVFormat) -> bool:
        """Return True if subtracting the mean lowers this format's error enough."""
        return format in self.centred and self.centred[format] < LEAST_GAIN * self.errors[format]

    def chosen(self, format: KVFormat) -> KVLayer:
        """Build this layer's entry of the plan."""
        return KVLayer(
            format=format,
            head_scales=self.centred_scales if self.gains(format) else self.head_scales,
            plain_scales=self.head_scales,
            key_mean=self.key_mean if self.gains(format) else None,
            errors={form.value: float(f"{self.best(form):.4g}") for form in self.errors},
            key_factors=self.key_factors,
        )


def measure_layer(
    spec: AttentionSpec,
    seen: tuple[list[Tensor], list[Tensor], list[Tensor]],
    project: Callable[[Tensor], Tensor],
    energy: Tensor,
) -> MeasuredLayer:
    """Measure one layer's formats.

    Args:
        seen: queries, keys and values of each row of text; keys after RoPE.
        project: output projection, from heads to the residual stream.
        energy: (rows, tokens), mean squares of the stream after the layer.
    """
    queries, keys, values = seen
    every_key, every_value = torch.cat(keys), torch.cat(values)
    rows = [(q[::EVERY], k, v) for q, k, v in zip(queries, keys, values, strict=True)][:ROWS]
    heads = [attend_with(spec, LayerPrecision(KVFormat.FP32), *row) for row in rows]
    exact = [project(row) for row in heads]

    def error(precision: LayerPrecision, of: Sequence[Row] | None = None) -> float:
        shares = [
            (project(attend_with(spec, precision, *row)) - wanted).square().mean(-1)
            / of_row[::EVERY]
            for row, wanted, of_row in zip(of or rows, exact, energy, strict=False)
        ]
        return float(torch.cat(shares).mean())

    factors = choose_factors(spec, rows, every_key, error)
    if factors is not None:
        rows, every_key = even(rows, factors), every_key / factors
    mean = every_key.mean(0)
    scales = torch.stack([largest_scales(every_key), largest_scales(every_value)])
    scales = search_scales(spec, rows, heads, scales, part=0)
    scales = search_scales(spec, rows, heads, scales, part=1)
    errors = {form: error(LayerPrecision(form, scales)) for form in MEASURED}
    centred, of_centred = {}, torch.stack([largest_scales(every_key - mean), scales[1]])
    if spec.softcap is None:
        of_centred = search_scales(spec, rows, heads, of_centred, part=0, mean=mean)
        for form in set(MEASURED) - {KVFormat.BF16}:
            centred[form] = error(LayerPrecision(form, of_centred, mean))
    return MeasuredLayer(
        head_scales=scales,
        centred_scales=of_centred,
        key_mean=mean,
        errors=errors,
        centred=centred,
        num_elements=2 * spec.num_kv_heads * spec.head_dim,
        bits={form: bits_per_element(form, spec.head_dim) for form in MEASURED},
        key_factors=factors,
    )


def bits_per_element(format: KVFormat, head_dim: int) -> float:
    """Return the mean bits of keys and values, 16-bit scales and offsets included."""
    by_token, both_by_token, by_channel = 16 / head_dim, 32 / head_dim, 32 / PAGE_TOKENS
    match format:
        case KVFormat.FP8:
            return 8
        case KVFormat.INT8:
            return 8 + by_token
        case KVFormat.K8V4:
            return (8 + by_token + 4 + both_by_token) / 2
        case KVFormat.INT4_SEALED:
            return (4 + by_channel + 4 + both_by_token) / 2
        case KVFormat.INT4:
            return 4 + both_by_token
    return 8 * format.storage_dtype.itemsize


def measure_kv(
    source: ModelSource, rows: Tensor, folder: Path, device: torch.device
) -> list[MeasuredLayer]:
    """Run rows through a model and measure every layer; arguments as for `calibrate_kv`.

    Layers with `key_factors` are measured with the factors applied.
    """
    watch = AttentionWatch()
    walk = Walk(source, rows, folder, device, watch=watch)
    layers = []
    for index, attention in source.spec.attention_layers.items():
        project = _passed(walk, watch, index)
        layers.append(measure_layer(attention, watch.take(), project, walk.energy()))
        del project  # with its layer
    return layers


def _passed(walk: Walk, watch: AttentionWatch, index: int) -> Callable[[Tensor], Tensor]:
    """Run all rows through a layer; return its output projection."""
    with walk.whole(index) as block:
        watch.take()  # of the pass to its experts
        walk.advance(block)
    return _projection(block)


def _projection(block: TransformerBlock) -> Callable[[Tensor], Tensor]:
    layer, norm = block.layer, block.layer.mixer_post_norm

    def project(heads: Tensor) -> Tensor:
        added = block.output(heads)
        return added if norm is None else norm.of(added, layer.backend)

    return project
