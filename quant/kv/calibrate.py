"""Chooses the precision of each layer's KV cache from what formats cost on text, and writes it."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import QuantizeError
from appliance.files import read_json
from appliance.kernels.kv_format import KVFormat
from appliance.model.executor import heads_of
from appliance.model_files.checkpoint import write_json
from appliance.quant.formats.kv_plan import FILE, SCALE_NAMES, read_plan, to_json
from appliance.quant.kv.measure import measure_kv
from appliance.quant.run.shard_writer import TensorLayout
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.formats.kv_plan import KVLayer
    from appliance.quant.kv.measure import MeasuredLayer
    from appliance.quant.run.shard_writer import PlacedTensors
    from appliance.quant.text.calibration import Calibration

# Formats to choose from. FP8 is left out: it takes more bits than K8V4 and loses more quality
# (measured with scripts/benchmark cpu_quality).
CHOICES = (KVFormat.INT4_SEALED, KVFormat.K8V4, KVFormat.INT8, KVFormat.BF16)
# At up to this many bits, other readers use an FP8 cache.
MOST_BITS_FOR_FP8 = 8.5


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
        plan = calibrate_kv(source, calibration.rows, Path(place), device, budget)
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
