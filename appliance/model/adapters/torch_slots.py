"""Adapters in the torch decoder: adds their factors' products to the outputs of linears."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from appliance.model.adapters.targets import Expansion, PlacedFactors, place_factors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.backend import Linear
    from appliance.kernels.cpu.step_structs import AdapterPlace
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.adapters.adapter import Adapter
    from appliance.model.adapters.targets import AdapterTarget


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """An adapter's factors on the device, by layer and place."""

    factors: Mapping[tuple[int, AdapterPlace], PlacedFactors]

    @property
    def nbytes(self) -> int:
        return sum(
            factors.shrink.nbytes + sum(part.matrix.nbytes for part in factors.expansions)
            for factors in self.factors.values()
        )


class TorchAdapterSlots:
    """Slots for the torch decoder; see `AdapterSlots`.

    Args:
        targets: the linears that adapters may change.
        device: where the factors go.
        dtype: of the factors.
        count: number of slots.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        device: torch.device,
        dtype: torch.dtype,
        count: int,
    ) -> None:
        self.held: list[TorchAdapter | None] = [None] * count
        self._targets = targets
        self._device = device
        self._dtype = dtype

    def lay_out(self, adapter: Adapter) -> TorchAdapter:
        placed = place_factors(adapter, self._targets)
        return TorchAdapter({at: self._moved(factors) for at, factors in placed.items()})

    def put(self, slot: int, laid_out: TorchAdapter | None) -> None:
        self.held[slot] = laid_out

    def _moved(self, factors: PlacedFactors) -> PlacedFactors:
        return PlacedFactors(
            factors.shrink.to(self._device, self._dtype),
            factors.scales.to(self._device),
            tuple(
                Expansion(
                    part.matrix.to(self._device, self._dtype), part.first_output, part.first_rank
                )
                for part in factors.expansions
            ),
        )


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that have adapters.

    Attributes:
        slots: of each row, below 0 without an adapter.
        spans: rows in turn of one adapter.
    """

    slots: tuple[int, ...]
    spans: tuple[tuple[slice, TorchAdapter], ...]
    table: TorchAdapterSlots

    @classmethod
    def of(cls, batch: RaggedBatch) -> AdaptedRows | None:
        """Lay out a batch's rows; None if none has an adapter."""
        rows = batch.adapters
        if rows is None:
            return None
        assert isinstance(rows.table, TorchAdapterSlots)
        each = zip(rows.host_slots, batch.host_query_lens, strict=True)
        return cls._of([slot for slot, count in each for _ in range(count)], rows.table)

    @classmethod
    def _of(cls, slots: Sequence[int], table: TorchAdapterSlots) -> AdaptedRows:
        spans, start = [], 0
        for slot, group in groupby(slots):
            stop = start + len(list(group))
            adapter = table.held[slot] if slot >= 0 else None
            assert slot < 0 or adapter is not None, "a slot without an adapter"
            if adapter is not None:
                spans.append((slice(start, stop), adapter))
            start = stop
        return cls(tuple(slots), tuple(spans), table)

    def select(self, rows: Tensor) -> AdaptedRows:
        """Return the same of some rows."""
        return self._of([self.slots[row] for row in rows.tolist()], self.table)

    def at(self, layer: int) -> LayerAdapters:
        return LayerAdapters(self, layer)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of a step's rows in one layer."""

    rows: AdaptedRows
    layer: int

    def add(self, place: AdapterPlace, x: Tensor, out: Tensor) -> Tensor:
        """Add to the outputs of a place, in place; sums in float32.

        Rows without an adapter keep their bits.

        Args:
            place: whose linears were run.
            x: (num_tokens, in_features), their input.
            out: (num_tokens, outputs), what they yield.
        """
        for rows, adapter in self.rows.spans:
            factors = adapter.factors.get((self.layer, place))
            if factors is None:
                continue
            shrunk = x[rows].float() @ factors.shrink.float().T * factors.scales
            for part in factors.expansions:
                rank = slice(part.first_rank, part.first_rank + part.matrix.shape[1])
                outputs = slice(part.first_output, part.first_output + part.matrix.shape[0])
                added = shrunk[:, rank] @ part.matrix.float().T
                out[rows, outputs] = (out[rows, outputs].float() + added).to(out.dtype)
        return out


def run_adapted(
    linear: Linear, x: Tensor, adapters: LayerAdapters | None, place: AdapterPlace
) -> Tensor:
    """Run the linears of a place, with what adapters add."""
    out = linear(x)
    return out if adapters is None else adapters.add(place, x, out)
