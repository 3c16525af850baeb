"""Lists the linears that adapters may change, and the positions of their outputs.

A place is the group of linears with one input that executors run as one, with outputs one after
another. Knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec
from appliance.model.row_orders import delta_rows, head_rows
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.model.tensors import Role, tensor_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from appliance.model.adapters.adapter import Adapter
    from appliance.model.names import TensorNames
    from appliance.model.spec import DecoderSpec, LayerSpec
    from appliance.model.tensors import TensorSlot

_INTO_MLP = (AdapterPlace.INTO_MLP, AdapterPlace.OUT_OF_MLP)
_PLACES = {
    Role.QUERY: AdapterPlace.INTO_MIXER,
    Role.KEY: AdapterPlace.INTO_MIXER,
    Role.VALUE: AdapterPlace.INTO_MIXER,
    Role.QKV: AdapterPlace.INTO_MIXER,
    Role.INPUT: AdapterPlace.INTO_MIXER,
    Role.OUTPUT: AdapterPlace.OUT_OF_MIXER,
    Role.GATE: AdapterPlace.INTO_MLP,
    Role.UP: AdapterPlace.INTO_MLP,
    Role.GATE_UP: AdapterPlace.INTO_MLP,
    Role.DOWN: AdapterPlace.OUT_OF_MLP,
}


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Some rows of a linear, and the position of their first output in the place."""

    rows: slice | Tensor
    first_output: int

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    def part(self, first: int, last: int, first_output: int) -> TargetRows:
        """Return the rows of some of its outputs, and the first one's place among a rank's."""
        low, high = first - self.first_output, last - self.first_output
        if isinstance(self.rows, slice):
            return TargetRows(slice(self.rows.start + low, self.rows.start + high), first_output)
        return TargetRows(self.rows[low:high], first_output)


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear that an adapter may change.

    Attributes:
        slot: its weight, with Hugging Face name and shape.
        pieces: its rows in the executors' order.
        columns: of its inputs, first and one after the last, that a rank has; None: all.
    """

    slot: TensorSlot
    place: AdapterPlace
    pieces: tuple[TargetRows, ...]
    columns: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.slot.name.removesuffix(".weight")

    @property
    def inputs(self) -> slice:
        """Columns of A that are here."""
        return slice(*(self.columns or (0, self.slot.shape[1])))

    @property
    def in_features(self) -> int:
        first, last = self.columns or (0, self.slot.shape[1])
        return last - first

    @property
    def layer(self) -> int:
        assert self.slot.layer is not None
        return self.slot.layer


@dataclass(frozen=True, slots=True)
class Expansion:
    """Maps some of a place's shrunk numbers to some of its outputs.

    Attributes:
        matrix: (outputs, rank).
        first_output: its first output, among the place's.
        first_rank: its first shrunk number, among the place's.
    """

    matrix: Tensor
    first_output: int
    first_rank: int


@dataclass(frozen=True, slots=True)
class PlacedFactors:
    """Factors of a place: they add expand(scales * shrink(x)) to its outputs.

    Matrices are floats, or uint8 codes of 8 bits, of which 128 is 0.

    Attributes:
        shrink: (ranks, in_features), all parts one after another.
        scales: (ranks,) float32.
    """

    shrink: Tensor
    scales: Tensor
    expansions: tuple[Expansion, ...]


def adapter_targets(spec: DecoderSpec, names: TensorNames) -> dict[str, AdapterTarget]:
    """List the linears that adapters may change, by name; experts are excluded."""
    found: dict[str, AdapterTarget] = {}
    taken: dict[tuple[int, AdapterPlace], int] = {}  # outputs so far
    for slot in tensor_slots(spec, names):
        if not slot.is_linear or slot.expert is not None or slot.role not in _PLACES:
            continue
        assert slot.layer is not None
        place = _PLACES[slot.role]
        if _why_not(spec.layers[slot.layer], place):
            continue
        begin = taken.get((slot.layer, place), 0)
        pieces = _pieces(spec, names, slot, begin)
        taken[slot.layer, place] = begin + _own_outputs(spec, slot)
        target = AdapterTarget(slot, place, pieces)
        found[target.name] = target
    return found


def unserved_linears(spec: DecoderSpec, names: TensorNames) -> dict[str, str]:
    """Return, by name, the model part of each linear that no adapter may change."""
    found = {}
    for slot in tensor_slots(spec, names):
        if slot.layer is None or len(slot.shape) != 2 or slot.expert is not None:
            continue
        layer, place = spec.layers[slot.layer], _PLACES.get(slot.role, AdapterPlace.INTO_MIXER)
        if slot.role in (Role.ROUTER, Role.TOKEN_INPUT, Role.EXPERT_LATENT):
            continue
        gates = slot.role is Role.HEAD_GATES
        if part := "the gates of heads" if gates else _why_not(layer, place):
            found[slot.name.removesuffix(".weight")] = part
    return found


def _why_not(layer: LayerSpec, place: AdapterPlace) -> str:
    """Return the name of a model part that runs without adapters; "" for others."""
    if place not in _INTO_MLP:
        if isinstance(layer.mixer, LatentAttentionSpec):
            return "latent attention"
        return "a Mamba-2 layer" if isinstance(layer.mixer, Mamba2Spec) else ""
    mlp = layer.mlp.shared if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
    return "" if mlp is not None and mlp.gated else "an MLP without a gate"


def _own_outputs(spec: DecoderSpec, slot: TensorSlot) -> int:
    """Count the outputs before the next linear's; the gates of queries come last."""
    return slot.shape[0] // 2 if _has_gates(spec, slot) else slot.shape[0]


def _has_gates(spec: DecoderSpec, slot: TensorSlot) -> bool:
    if slot.role is not Role.QUERY:
        return False
    assert slot.layer is not None
    return spec.attention_layers[slot.layer].output_gate


def _pieces(
    spec: DecoderSpec, names: TensorNames, slot: TensorSlot, begin: int
) -> tuple[TargetRows, ...]:
    rows = slot.shape[0]
    if slot.role is Role.GATE_UP:
        half = rows // 2
        return TargetRows(slice(0, half), 0), TargetRows(slice(half, rows), half)
    assert slot.layer is not None
    mixer = spec.layers[slot.layer].mixer
    if slot.role in (Role.QKV, Role.QUERY, Role.KEY) and isinstance(mixer, AttentionSpec):
        order = head_rows(mixer, names, 1 if slot.role is Role.KEY else 0)
        if order is not None:
            return (TargetRows(torch.from_numpy(order), begin),)
    if slot.role is Role.INPUT and names.gated_delta.joined and isinstance(mixer, GatedDeltaSpec):
        return (TargetRows(torch.from_numpy(delta_rows(mixer)), begin),)
    if not _has_gates(spec, slot):
        return (TargetRows(slice(0, rows), begin),)
    assert isinstance(mixer, AttentionSpec)
    heads = torch.arange(rows).view(mixer.num_heads, 2, mixer.head_dim)
    last = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    return TargetRows(heads[:, 0].flatten(), 0), TargetRows(heads[:, 1].flatten(), last)


def place_factors(
    adapter: Adapter, targets: Mapping[str, AdapterTarget]
) -> dict[tuple[int, AdapterPlace], PlacedFactors]:
    """Order an adapter's factors as they run, by layer and place."""
    gathered: dict[tuple[int, AdapterPlace], list[str]] = {}
    for name in targets:
        if name in adapter.parts:
            target = targets[name]
            gathered.setdefault((target.layer, target.place), []).append(name)
    return {
        at: _placed(adapter, [targets[name] for name in names]) for at, names in gathered.items()
    }


def _placed(adapter: Adapter, targets: list[AdapterTarget]) -> PlacedFactors:
    parts = [adapter.parts[target.name] for target in targets]
    expansions: list[Expansion] = []
    first = 0
    for target, part in zip(targets, parts, strict=True):
        for piece in target.pieces:
            expansions.append(Expansion(part.b[piece.rows], piece.first_output, first))
        first += part.rank
    scales = [torch.full((part.rank,), part.scale) for part in parts]
    return PlacedFactors(
        torch.cat([part.a[:, own.inputs] for own, part in zip(targets, parts, strict=True)]),
        torch.cat(scales),
        tuple(expansions),
    )


def adapter_bytes(
    spec: DecoderSpec, names: TensorNames, rank: int, element_bytes: Callable[[str], int]
) -> int:
    """Return the bytes of an adapter of one rank that changes every target.

    Args:
        element_bytes: of the factors beside a weight, by the weight's name.
    """
    return rank * sum(
        sum(target.slot.shape) * element_bytes(target.slot.name)
        for target in adapter_targets(spec, names).values()
    )
