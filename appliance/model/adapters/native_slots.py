"""Adapters for the CPU library: factors in tiles, and a table of slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.step_structs import (
    AdapterPlace,
    AdapterStruct,
    ExpansionStruct,
    LowRankStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.adapters.factors import coded
from appliance.model.adapters.targets import place_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from appliance.kernels.cpu.structs import LinearStruct, ModelStruct
    from appliance.model.adapters.adapter import Adapter
    from appliance.model.adapters.targets import AdapterTarget, PlacedFactors


@dataclass(frozen=True, slots=True)
class NativeAdapter:
    """An adapter whose struct points into its arena."""

    struct: AdapterStruct
    arena: Arena

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes


class NativeAdapterSlots:
    """Slots for the CPU library; see `AdapterSlots`.

    Factors of places with packed weights are of 8 bits, others of `dtype`.

    Args:
        model: runs the adapters.
        targets: the linears that adapters may change.
        layers: of the model, first and one after the last that are here.

    Attributes:
        table: (count,) ap_adapter.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: ModelStruct,
        targets: Mapping[str, AdapterTarget],
        layers: tuple[int, int],
        dtype: torch.dtype,
        count: int,
    ) -> None:
        self.table = (AdapterStruct * count)()
        self._library = library
        self._model = model
        self._held: list[NativeAdapter | None] = [None] * count
        self._targets = targets
        self._layers = range(*layers)
        self._dtype = dtype
        # An engine serves one thread at a time, and steps keep the model's busy.
        self._engine = NativeEngine(library, 1)

    def lay_out(self, adapter: Adapter) -> NativeAdapter:
        arena = Arena()
        packer = WeightPacker(self._engine, arena, self._dtype)
        placed = {
            at: factors
            for at, factors in place_factors(adapter, self._targets).items()
            if at[0] in self._layers
        }
        places = [
            self._low_rank(packer, (layer, place), placed.get((layer, place)))
            for layer in self._layers
            for place in AdapterPlace
        ]
        struct = AdapterStruct(
            places=packer.structs(LowRankStruct, places),
            most_ranks=max(one.shrink.out_features for one in places),
        )
        return NativeAdapter(struct, arena)

    def put(self, slot: int, laid_out: NativeAdapter | None) -> None:
        self._held[slot] = laid_out
        self.table[slot] = AdapterStruct() if laid_out is None else laid_out.struct

    def _low_rank(
        self, packer: WeightPacker, at: tuple[int, AdapterPlace], factors: PlacedFactors | None
    ) -> LowRankStruct:
        if factors is None or not factors.expansions:
            return LowRankStruct()
        pack: Callable[[torch.Tensor], LinearStruct] = packer.linear
        layer, place = at[0] - self._layers.start, at[1]
        beside = self._library.ap_quantized_at(ctypes.byref(self._model), layer, place)
        if beside:
            factors, pack = coded(_in_order_of(beside.contents, factors)), packer.codes
        shrink = pack(factors.shrink)
        if beside:
            shrink.input_order = beside.contents.input_order
        expansions = [
            ExpansionStruct(pack(part.matrix), part.first_output, part.first_rank)
            for part in factors.expansions
        ]
        return LowRankStruct(
            shrink=shrink,
            scales=packer.floats(factors.scales),
            expansions=packer.structs(ExpansionStruct, expansions),
            num_expansions=len(expansions),
        )


def _in_order_of(weight: LinearStruct, factors: PlacedFactors) -> PlacedFactors:
    """Order the columns of A as a weight's columns."""
    if not weight.input_order:
        return factors
    order = (ctypes.c_int32 * weight.in_features).from_address(weight.input_order)
    return replace(factors, shrink=factors.shrink[:, list(order)])
