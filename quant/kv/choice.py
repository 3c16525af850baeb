"""Chooses each layer's format for the least total error within a budget of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.kv_format import KVFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.kv.measure import MeasuredLayer


# Formats to choose from. FP8 is left out: it takes more bits than K8V4 and loses more quality
# (measured with scripts/benchmark cpu_quality).
CHOICES = (KVFormat.INT4_SEALED, KVFormat.K8V4, KVFormat.INT8, KVFormat.BF16)


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
