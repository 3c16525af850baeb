"""Chooses the precision of each layer's KV cache from what formats cost on text, and writes it.

The rows pass once through the unquantized layers. Each layer's keys, values and queries give FP8
scales per head, the mean key and, per format, the error of attention after the output projection,
as a share of the residual stream's energy, which makes layers comparable.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import QuantizeError
from appliance.files import read_json
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.model.executor import heads_of
from appliance.model_files.checkpoint import write_json
from appliance.quant.formats.kv_plan import FILE, SCALE_NAMES, KVLayer, read_plan, to_json
from appliance.quant.kv.attention import (
    EVERY,
    AttentionWatch,
    attend_with,
    largest_scales,
    search_scales,
)
from appliance.quant.kv.even_keys import choose_factors, even
from appliance.quant.run.shard_writer import TensorLayout
from appliance.quant.walk.walk import Walk
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.model.spec import AttentionSpec
    from appliance.quant.kv.even_keys import Row
    from appliance.quant.run.shard_writer import PlacedTensors
    from appliance.quant.text.calibration import Calibration
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
MOST_ROWS = 16  # of the calibration text: queries, keys and values of a layer are held in memory
LEAST_GAIN = 0.9  # subtract the mean key if less than this share of the error is left
# Formats to choose from. FP8 is left out: it takes more bits than K8V4 and loses more quality
# (measured with scripts/benchmark cpu_quality).
CHOICES = (KVFormat.INT4_SEALED, KVFormat.K8V4, KVFormat.INT8, KVFormat.BF16)
# At up to this many bits, other readers use an FP8 cache.
MOST_BITS_FOR_FP8 = 8.5


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The result of a calibration.

    Attributes:
        bits: mean bits per element, scales included.
    """

    layers: tuple[KVLayer, ...]
    bits: float
    budget: float

    def __str__(self) -> str:
        counts = Counter(layer.format.value for layer in self.layers)
        formats = ", ".join(f"{counted(count, 'layer')} {form}" for form, count in counts.items())
        means = sum(layer.key_mean is not None for layer in self.layers)
        centred = f"; the mean key is subtracted in {counted(means, 'layer')}" if means else ""
        evened = sum(layer.key_factors is not None for layer in self.layers)
        if evened:
            centred += f"; the weights even out key channels in {counted(evened, 'layer')}"
        return f"KV cache: {formats}, {self.bits:.2f} bits an element{centred}"


def calibrate_kv(
    source: ModelSource, rows: Tensor, folder: Path, device: torch.device, budget: float
) -> KVPlan:
    """Run rows through a model and choose each layer's KV precision.

    A plan with `key_factors` is for the model that `even_keys.with_even_keys` returns.

    Args:
        rows: (num_rows, row_tokens) int64.
        folder: for activations between layers.
        budget: mean bits per element, scales included.

    Raises:
        QuantizeError: even the fewest bits exceed the budget.
    """
    layers = measure_kv(source, rows, folder, device)
    formats = choose_formats(layers, budget)
    if formats is None:
        least = mean_bits(layers, [min(CHOICES, key=layer.bits.__getitem__) for layer in layers])
        raise QuantizeError(
            f"a KV cache of {budget:g} bits an element cannot be had: the fewest are {least:.2f}"
        )
    chosen = tuple(layer.chosen(form) for layer, form in zip(layers, formats, strict=True))
    return KVPlan(chosen, mean_bits(layers, formats), budget)


def kept_kv_plan(
    source: ModelSource,
    calibration: Calibration,
    state: Path,
    device: torch.device,
    budget: float,
) -> KVPlan:
    """Return the plan of an earlier run, or make one with `calibrate_kv` and keep it.

    `budget` is in mean bits per element; `state` is the folder of this run's state.

    Raises:
        QuantizeError: even the fewest bits exceed the budget.
    """
    layers = read_plan(state, heads_of(source.spec))
    if layers is not None:
        return KVPlan(layers, float(read_json(state / FILE)["bits_per_element"]), budget)
    with tempfile.TemporaryDirectory(dir=state, prefix="kv-") as place:
        rows = calibration.rows[:MOST_ROWS]
        plan = calibrate_kv(source, rows, Path(place), device, budget)
    write_kv_plan(plan, state)
    return plan


def choose_formats(layers: Sequence[MeasuredLayer], budget: float) -> list[KVFormat] | None:
    """Choose each layer's format for the least total error within a budget of bits.

    Each layer starts with the fewest bits; each step adds bits where they remove the most error,
    until no step fits. `budget` is in mean bits per element, scales included.

    Returns:
        None if even the fewest bits exceed the budget.
    """
    chosen = [min(CHOICES, key=layer.bits.__getitem__) for layer in layers]
    total = sum(layer.num_elements for layer in layers)
    left = budget * total - sum(
        layer.bits[form] * layer.num_elements for layer, form in zip(layers, chosen, strict=True)
    )
    if left < 0:
        return None
    while True:
        steps: list[tuple[float, float, int, KVFormat]] = []
        for index, (layer, now) in enumerate(zip(layers, chosen, strict=True)):
            for form in CHOICES:
                cost = (layer.bits[form] - layer.bits[now]) * layer.num_elements
                gain = layer.best(now) - layer.best(form)
                if 0 < cost <= left and gain > 0:
                    steps.append((gain / cost, cost, index, form))
        if not steps:
            return chosen
        _, cost, index, form = max(steps, key=lambda step: (step[0], -step[2]))
        chosen[index] = form
        left -= cost


def mean_bits(layers: Sequence[MeasuredLayer], formats: Sequence[KVFormat]) -> float:
    total = sum(layer.num_elements for layer in layers)
    parts = (of.bits[form] * of.num_elements for of, form in zip(layers, formats, strict=True))
    return sum(parts) / total


def write_kv_plan(plan: KVPlan, folder: Path) -> None:
    write_json(folder / FILE, to_json(plan.layers, plan.bits))


def kv_scale_layouts(source: ModelSource, plan: KVPlan | None) -> list[TensorLayout]:
    return [TensorLayout(name, torch.float32, (1,)) for name, _ in _scales(source, plan)]


def write_kv_scales(source: ModelSource, plan: KVPlan | None, writer: PlacedTensors) -> None:
    """Write an FP8 scale for each layer's keys and values: the largest head's."""
    for name, scale in _scales(source, plan):
        writer.write(name, [torch.tensor([scale])])


def with_kv_scheme(config: dict[str, Any], plan: KVPlan | None) -> dict[str, Any]:
    """Add the FP8 cache's scheme to config.json."""
    if plan is None or plan.budget > MOST_BITS_FOR_FP8:
        return config
    scheme = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    quantization = config["quantization_config"] | {"kv_cache_scheme": scheme}
    return config | {"quantization_config": quantization}


def _scales(source: ModelSource, plan: KVPlan | None) -> Iterator[tuple[str, float]]:
    if plan is None or plan.budget > MOST_BITS_FOR_FP8:
        return
    for index, layer in enumerate(plan.layers):
        for name, scales in zip(SCALE_NAMES, layer.plain_scales, strict=True):
            yield source.family.names.in_layer(index, name), float(scales.max())


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
