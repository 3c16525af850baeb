"""Chooses the precision of each layer's KV cache from what formats cost it on text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.quant.kv.choice import CHOICES, choose_formats, mean_bits
from appliance.quant.kv.measure import measure_kv
from appliance.wording import counted

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.formats.kv_plan import KVLayer


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
