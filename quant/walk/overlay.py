"""Presents a model with some weights replaced by quantized ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.weight import some_rows
from appliance.quant.walk.pieces import ReadsRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.kernels.packed import PackedWeight
    from appliance.kernels.weight import Weight
    from appliance.quant.formats import WeightReader


class OverlaidWeights:
    """A `WeightReader` that replaces some weights, by name."""

    def __init__(self, weights: WeightReader, others: Mapping[str, PackedWeight]) -> None:
        self._weights = weights
        self._others = others

    def tensor_names(self) -> list[str]:
        return self._weights.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        other = self._others.get(name)
        return self._weights.packed_bits(name) if other is None else other.bits

    def float_bits(self, name: str) -> int | None:
        return None if name in self._others else self._weights.float_bits(name)

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()

    def load(self, name: str) -> Weight:
        return self._others[name] if name in self._others else self._weights.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        if name in self._others:
            return self._others[name].rows(slice(start, stop))
        if isinstance(self._weights, ReadsRows):
            return self._weights.load_rows(name, start, stop)
        return some_rows(self._weights.load(name), slice(start, stop), torch.float32)
