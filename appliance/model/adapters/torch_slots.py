"""Adapters in the torch decoder: a table of all slots, and the step's rows that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from appliance.kernels.adapters.factors import OutputRun, StackedFactors, blocks_of, padded_rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from appliance.kernels.cpu.step_structs import AdapterPlace
    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.adapter import Adapter
    from appliance.model.adapters.targets import AdapterTarget


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """An adapter on the device, as a row of each tensor of the table."""

    factors: Tensor  # (elements of all places,)
    scales: Tensor  # (parts of all places,) float32
    ranks: Tensor  # (parts of all places,) int32

    @property
    def nbytes(self) -> int:
        return self.factors.nbytes + self.scales.nbytes + self.ranks.nbytes


class _Place(NamedTuple):
    """Position of a place's factors in a row of the table."""

    targets: tuple[AdapterTarget, ...]  # one part each
    pieces: tuple[OutputRun, ...]
    first_part: int
    shrink_at: int
    expand_at: int
    end: int

    @property
    def in_features(self) -> int:
        return self.targets[0].in_features


class TorchAdapterSlots:
    """Slots for the torch decoder; see `AdapterSlots`.

    No memory moves, so that CUDA graphs can read it.

    Args:
        targets: the linears that adapters may change.
        most_ranks: largest rank of an adapter.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        device: torch.device,
        dtype: torch.dtype,
        count: int,
        most_ranks: int,
    ) -> None:
        self.count = count
        self._device = device
        self._rank = padded_rank(most_ranks)
        self._places = _places(targets, self._rank)
        last = list(self._places.values())[-1]
        num_parts = last.first_part + len(last.targets)
        self._factors = torch.zeros((count, last.end), dtype=dtype, device=device)
        self._scales = torch.zeros((count, num_parts), device=device)
        self._ranks = torch.zeros((count, num_parts), dtype=torch.int32, device=device)
        self._is_held = [False] * count
        self._stacked = {at: self._stack(place) for at, place in self._places.items()}

    @torch.inference_mode()
    def lay_out(self, adapter: Adapter) -> TorchAdapter:
        factors = torch.zeros(self._factors.shape[1], dtype=self._factors.dtype)
        scales = torch.zeros(self._scales.shape[1])
        ranks = torch.zeros(self._ranks.shape[1], dtype=torch.int32)
        for place in self._places.values():
            shrink, expand = self._views(factors, place)
            for number, target in enumerate(place.targets):
                part = adapter.parts.get(target.name)
                if part is None:
                    continue
                shrink[number, : part.rank] = part.a[:, target.inputs]
                scales[place.first_part + number] = part.scale
                ranks[place.first_part + number] = part.rank
                own = [piece for piece in place.pieces if piece.part == number]
                for piece, rows in zip(own, target.pieces, strict=True):
                    last = piece.first_row + piece.num_rows
                    expand[piece.first_row : last, : part.rank] = part.b[rows.rows]
        return TorchAdapter(*(part.to(self._device) for part in (factors, scales, ranks)))

    @torch.inference_mode()
    def put(self, slot: int, laid_out: TorchAdapter | None) -> None:
        self._is_held[slot] = laid_out is not None
        if laid_out is None:
            self._ranks[slot] = 0
            return
        self._factors[slot] = laid_out.factors
        self._scales[slot] = laid_out.scales
        self._ranks[slot] = laid_out.ranks

    def check(self, slots: tuple[int, ...]) -> None:
        """Assert that no sequence has an empty slot."""
        assert all(slot < 0 or self._is_held[slot] for slot in slots), "a slot without an adapter"

    def at(self, layer: int, place: AdapterPlace) -> StackedFactors | None:
        """Return a place's factors; None if no adapter can change it."""
        return self._stacked.get((layer, place))

    def places(self) -> Collection[StackedFactors]:
        return self._stacked.values()

    def _views(self, row: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        """View a place's factors in one row of the table, or in all rows."""
        before, num_parts = row.shape[:-1], len(place.targets)
        shrink = row[..., place.shrink_at : place.expand_at]
        expand = row[..., place.expand_at : place.end]
        return (
            shrink.view(*before, num_parts, self._rank, place.in_features),
            expand.view(*before, -1, self._rank),
        )

    def _stack(self, place: _Place) -> StackedFactors:
        shrink, expand = self._views(self._factors, place)
        parts = slice(place.first_part, place.first_part + len(place.targets))
        blocks = torch.tensor(blocks_of(place.pieces), dtype=torch.int32, device=self._device)
        return StackedFactors(
            shrink, expand, self._scales[:, parts], self._ranks[:, parts], place.pieces, blocks
        )


def _places(
    targets: Mapping[str, AdapterTarget], rank: int
) -> dict[tuple[int, AdapterPlace], _Place]:
    gathered: dict[tuple[int, AdapterPlace], list[AdapterTarget]] = {}
    for target in targets.values():
        gathered.setdefault((target.layer, target.place), []).append(target)
    found, first_part, at = {}, 0, 0
    for key, own in gathered.items():
        pieces, num_rows = [], 0
        for part, target in enumerate(own):
            for rows in target.pieces:
                pieces.append(OutputRun(rows.first_output, num_rows, rows.count, part))
                num_rows += rows.count
        expand_at = at + len(own) * rank * own[0].in_features
        end = expand_at + num_rows * rank
        found[key] = _Place(tuple(own), tuple(pieces), first_part, at, expand_at, end)
        first_part, at = first_part + len(own), end
    return found


class AdaptedRows:
    """The rows of a step, some of which have adapters.

    Args:
        slots: (num_tokens,) int32 on the device, negative without an adapter.
    """

    def __init__(self, slots: Tensor, table: TorchAdapterSlots, backend: Backend) -> None:
        self._slots = slots
        self.table = table
        self.backend = backend
        self.work = backend.plan_adapters(slots, table.count)

    @classmethod
    def of(cls, batch: RaggedBatch, backend: Backend) -> AdaptedRows | None:
        """Build the rows of a batch; None if no row has an adapter."""
        adapters = batch.adapters
        if adapters is None:
            return None
        assert isinstance(adapters.table, TorchAdapterSlots)
        adapters.table.check(adapters.host_slots)
        rows = torch.arange(
            len(batch.slot_mapping), dtype=torch.int32, device=adapters.slots.device
        )
        owners = torch.searchsorted(batch.query_start[1:].contiguous(), rows, right=True)
        # Padding rows belong to the sequence after the last.
        slots = torch.nn.functional.pad(adapters.slots, (0, 1), value=-1)
        return cls(slots.index_select(0, owners), adapters.table, backend)

    def select(self, rows: Tensor) -> AdaptedRows:
        return AdaptedRows(self._slots.index_select(0, rows), self.table, self.backend)

    def at(self, layer: int) -> LayerAdapters:
        return LayerAdapters(self, layer)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    rows: AdaptedRows
    layer: int

    def add(self, place: AdapterPlace, x: Tensor, out: Tensor) -> Tensor:
        """Add to the outputs of a place, in place, and return them.

        Rows without an adapter stay bit-identical.

        Args:
            x: (num_tokens, in_features), their input.
            out: (num_tokens, outputs), their outputs.
        """
        factors = self.rows.table.at(self.layer, place)
        if factors is not None:
            self.rows.backend.add_adapters(out, x, factors, self.rows.work)
        return out


def run_adapted(
    linear: Linear, x: Tensor, adapters: LayerAdapters | None, place: AdapterPlace
) -> Tensor:
    """Run the linears of a place and add the adapters' changes."""
    out = linear(x)
    return out if adapters is None else adapters.add(place, x, out)
