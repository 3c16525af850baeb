"""Adapters of a model of several ranks: each lays out its part of the factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.engine.ranks.messages import PutAdapter
from appliance.model.adapters.adapter import Adapter, LowRank

if TYPE_CHECKING:
    from appliance.engine.ranks.native_ranks import NativeRanks
    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.model.adapters.native_slots import NativeAdapter, NativeAdapterSlots
    from appliance.model.adapters.torch_slots import TorchAdapter, TorchAdapterSlots

_A, _B = ".a", ".b"


@dataclass(frozen=True, slots=True)
class RankedAdapter:
    """An adapter laid out in rank 0, with its message to the other ranks."""

    own: NativeAdapter | TorchAdapter
    content: bytes
    scales: dict[str, float]

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + len(self.content)


@dataclass(frozen=True, slots=True)
class RankedAdapterSlots:
    """Slots in all ranks; see `AdapterSlots`."""

    own: NativeAdapterSlots | TorchAdapterSlots
    ranks: NativeRanks | TorchRanks

    def lay_out(self, adapter: Adapter) -> RankedAdapter:
        content, scales = pack_adapter(adapter)
        return RankedAdapter(self.own.lay_out(adapter), content, scales)

    def put(self, slot: int, laid_out: RankedAdapter | None) -> None:
        own: Any = None if laid_out is None else laid_out.own  # of the slots' kind
        self.own.put(slot, own)
        content = None if laid_out is None else laid_out.content
        self.ranks.call(PutAdapter(slot, content, {} if laid_out is None else laid_out.scales))


def pack_adapter(adapter: Adapter) -> tuple[bytes, dict[str, float]]:
    """Return an adapter's factors as safetensors, and the scale of each part."""
    from safetensors.torch import save

    tensors = {}
    for name, part in adapter.parts.items():
        tensors[name + _A], tensors[name + _B] = part.a.contiguous(), part.b.contiguous()
    return save(tensors), {name: part.scale for name, part in adapter.parts.items()}


def unpack_adapter(content: bytes, scales: dict[str, float]) -> Adapter:
    """Return the adapter that `pack_adapter` was given, without its notes."""
    from safetensors.torch import load

    tensors = load(content)
    parts = {
        name: LowRank(tensors[name + _A], tensors[name + _B], scale)
        for name, scale in scales.items()
    }
    return Adapter("", parts)
