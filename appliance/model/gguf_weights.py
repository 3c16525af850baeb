"""Presents a GGUF file's tensors under their Hugging Face names and row order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from appliance.gguf.types import FLOAT_BITS, held_bytes, widened_bits
from appliance.model.gguf_gated_delta import as_in_checkpoints, stored_rows
from appliance.model.linear import halves_from_pairs
from appliance.model.recurrent_spec import GatedDeltaSpec
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, TensorSlot, tensor_slots

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.kernels.weight import Weight
    from appliance.model.families.family import Family
    from appliance.model.spec import DecoderSpec


class GGUFWeights:
    """Reads tensors by their Hugging Face names; quantized ones keep their own codes.

    Args:
        file: an open file of the family.
        family: has a GGUF mapping.
        spec: built from the file's metadata.
    """

    def __init__(self, file: GGUFFile, family: Family, spec: DecoderSpec) -> None:
        assert family.gguf is not None
        self._file = file
        self._mapping = family.gguf
        self._names = family.names
        self._spec = spec
        slots = tensor_slots(spec, family.names)
        stored = tensor_slots(spec, family.gguf.names)
        present = set(file.tensor_names())
        self._slots: dict[str, tuple[TensorSlot, str]] = {
            slot.name: (slot, source.name)
            for slot, source in zip(slots, stored, strict=True)
            if source.name in present
        }

    def tensor_names(self) -> list[str]:
        """List the Hugging Face names of the tensors in the file."""
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, (out_features, in_features) of a linear."""
        slot, stored = self._slots[name]
        shape = tuple(self._file.shape(stored))
        if slot.role in (Role.FILTER, Role.ROUTER) and shape == squeezed(slot.shape):
            return slot.shape
        if slot.expert is None:
            return shape
        # One tensor holds all experts; with more or fewer of them no expert's shape fits.
        return shape[1:] if shape[:1] == (self._num_experts(slot),) else shape

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a matrix's codes in the packed form; None if it loads dense."""
        stored = self._slots[name][1]
        return widened_bits(self._file.type_name(stored)) if len(self.shape(name)) == 2 else None

    def held_bytes(self, name: str) -> float:
        """Return the bytes of each of a matrix's weights in the CPU library, with its scales."""
        return held_bytes(self._file.type(self._slots[name][1]))

    def float_bits(self, name: str) -> int | None:
        """Return the bits of floating-point codes, None of others."""
        return FLOAT_BITS.get(self._file.type_name(self._slots[name][1]))

    def notes(self) -> tuple[str, ...]:
        """Report the loss in types that the packed form does not hold exactly."""
        losses = self._file.losses()
        if not losses:
            return ()
        each = ", ".join(f"{name} {error:.2%}" for name, error in sorted(losses.items()))
        return (f"brought into packed form with a relative error of the weights of {each}",)

    def load(self, name: str) -> Weight:
        return self.load_rows(name, 0, self.shape(name)[0])

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        """Read rows `start` to `stop` of a tensor."""
        slot, stored_name = self._slots[name]
        if slot.expert is not None:
            return self._file.load_rows(stored_name, start, stop, part=slot.expert)
        tensor = self._ordered_rows(slot, stored_name, start, stop)
        if slot.role in (Role.FILTER, Role.ROUTER) and isinstance(tensor, Tensor):
            return tensor.view(-1, *slot.shape[1:])
        delta, part = self._delta(slot)
        if delta is not None:
            tensor = as_in_checkpoints(tensor, part, self._names.gated_delta, delta)
        if slot.role is Role.NORM and self._mapping.norm_shift:
            assert isinstance(tensor, Tensor), name
            return tensor.float() - self._mapping.norm_shift
        return tensor

    def _ordered_rows(self, slot: TensorSlot, stored_name: str, start: int, stop: int) -> Weight:
        order, shape = self._stored_rows(slot), self._file.shape(stored_name)
        if slot.shape[0] == 1 and len(shape) < len(slot.shape):  # the only row, without its number
            return self._file.load_rows(stored_name, 0, shape[0])
        if order is None:
            return self._file.load_rows(stored_name, start, stop)
        rows = order[start:stop]
        first = int(rows.min())
        tensor = self._file.load_rows(stored_name, first, int(rows.max()) + 1)
        rows = rows - first
        return tensor[rows] if isinstance(tensor, Tensor) else tensor.rows(rows)

    def _stored_rows(self, slot: TensorSlot) -> Tensor | None:
        """Return each row's stored row; None where the order is the same."""
        if slot.role in (Role.QUERY, Role.KEY) and self._mapping.interleaved_rope:
            return halves_from_pairs(slot.shape[0], self._head_dim(slot))
        delta, part = self._delta(slot)
        return None if delta is None else stored_rows(part, self._names.gated_delta, delta)

    def _delta(self, slot: TensorSlot) -> tuple[GatedDeltaSpec | None, str]:
        """Return the layer's Gated DeltaNet if its value heads are tiled, and the part's name."""
        if slot.layer is None or not self._mapping.tiled_values:
            return None, ""
        mixer = self._spec.layers[slot.layer].mixer
        part = slot.name.removeprefix(self._names.in_layer(slot.layer, ""))
        found = mixer if isinstance(mixer, GatedDeltaSpec) else None
        return found, part.removesuffix(".weight")

    def _num_experts(self, slot: TensorSlot) -> int:
        assert slot.layer is not None
        mlp = self._spec.layers[slot.layer].mlp
        assert isinstance(mlp, ExpertsSpec)
        return mlp.router.num_experts

    def _head_dim(self, slot: TensorSlot) -> int:
        assert slot.layer is not None
        return self._spec.attention_layers[slot.layer].head_dim


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its dimensions of 1, which llama.cpp's converter drops."""
    return tuple(size for size in shape if size != 1)
