"""Presents a GGUF file's tensors under their Hugging Face names, in that row order."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from appliance.gguf.types import FLOAT_BITS, HELD_TYPES, held_bytes, widened_bits
from appliance.kernels import arrays
from appliance.kernels.weight import dense
from appliance.model.gguf_gated_delta import as_in_checkpoints, stored_rows
from appliance.model.linear import LinearPart, halves_from_pairs
from appliance.model.recurrent_spec import GatedDeltaSpec
from appliance.model.row_orders import attention_rows
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, TensorSlot, tensor_slots

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.kernels.weight import Weight
    from appliance.model.families.family import Family, GGUFMapping
    from appliance.model.names import TensorNames
    from appliance.model.spec import DecoderSpec


class GGUFWeights:
    """Reads tensors by their Hugging Face names; quantized ones keep their codes."""

    def __init__(self, file: GGUFFile, family: Family, spec: DecoderSpec) -> None:
        assert family.gguf is not None
        self._file = file
        self._mapping = family.gguf
        self._names = family.names
        self._gguf_names = names_in_gguf(family.gguf, set(file.tensor_names()))
        self._spec = spec
        slots = tensor_slots(spec, family.names)
        stored = tensor_slots(spec, self._gguf_names)
        present = set(file.tensor_names())
        self._slots: dict[str, tuple[TensorSlot, str]] = {}
        for slot, source in zip(slots, stored, strict=True):
            name = self._stored_name(slot, source.name, present)
            if name is not None:
                self._slots[slot.name] = (slot, name)

    def tensor_names(self) -> list[str]:
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, (out_features, in_features) of a linear."""
        slot, stored = self._slots[name]
        shape = tuple(self._file.shape(stored))
        if slot.role in (Role.FILTER, Role.ROUTER, Role.RATE):
            return slot.shape if squeezed(shape) == squeezed(slot.shape) else shape
        if slot.role is Role.HEAD_NORM:  # a row per group of heads
            return slot.shape if prod(shape) == prod(slot.shape) else shape
        if self._is_halved(slot, stored):
            return slot.shape if self._halves_fit(slot) else shape
        if slot.expert is None:
            return shape
        if self._is_merged(slot, stored):
            shape = (*shape[:1], *(shape[1] // 2, *shape[2:])) if len(shape) == 3 else shape
        # One tensor holds all experts; a wrong number of them fits no expert's shape.
        return shape[1:] if shape[:1] == (self._num_experts(slot),) else shape

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a matrix's codes in packed form; None if it loads dense."""
        slot, stored = self._slots[name]
        if self._is_halved(slot, stored):
            return None
        return widened_bits(self._file.type_name(stored)) if len(self.shape(name)) == 2 else None

    def held_bytes(self, name: str) -> float:
        """Return a matrix's bytes per weight as kernels hold it, scales included."""
        return held_bytes(self._file.type(self._slots[name][1]))

    def is_held(self, name: str) -> bool:
        """Return True if a matrix's blocks are multiplied as they are in the file."""
        slot, stored = self._slots[name]
        held = self._file.type_name(stored) in HELD_TYPES and not self._is_halved(slot, stored)
        return held and len(self.shape(name)) == 2

    def block_size(self, name: str) -> int:
        """Return the number of inputs that share scales in the file."""
        return self._file.type(self._slots[name][1]).block_size

    def float_bits(self, name: str) -> int | None:
        """Return the bits of a weight's floating-point codes; None if it has none."""
        slot, stored = self._slots[name]
        if self._is_halved(slot, stored):
            return None
        return FLOAT_BITS.get(self._file.type_name(stored))

    def notes(self) -> tuple[str, ...]:
        """Report the loss in types that the packed form cannot hold exactly."""
        losses = self._file.losses()
        if not losses:
            return ()
        each = ", ".join(f"{name} {error:.2%}" for name, error in sorted(losses.items()))
        return (f"brought into packed form with a relative error of the weights of {each}",)

    def load(self, name: str) -> Weight:
        return self.load_rows(name, 0, self.shape(name)[0])

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        slot, stored_name = self._slots[name]
        if self._is_halved(slot, stored_name):
            return latent_heads(self._file, *self._halves(slot))[start:stop]
        if slot.expert is not None:
            if self._is_merged(slot, stored_name) and slot.role is Role.UP:
                start, stop = start + slot.shape[0], stop + slot.shape[0]
            return self._file.load_rows(stored_name, start, stop, part=slot.expert)
        tensor = self._ordered_rows(slot, stored_name, start, stop)
        if slot.role in (Role.FILTER, Role.ROUTER) and arrays.is_array(tensor):
            return tensor.view(-1, *slot.shape[1:])
        if slot.role is Role.RATE and arrays.is_array(tensor) and len(slot.shape) == 1:
            tensor = tensor.view(-1)
            is_rate = stored_name.endswith(f".{self._gguf_names.mamba2.log_rates}")
            return arrays.log(-tensor.float()) if is_rate else tensor
        if slot.role is Role.HEAD_NORM and arrays.is_array(tensor):
            return tensor.reshape(-1)
        delta, part = self._delta(slot)
        if delta is not None:
            tensor = as_in_checkpoints(tensor, part, self._names.gated_delta, delta)
        if slot.role is Role.NORM and self._mapping.norm_shift:
            assert arrays.is_array(tensor), name
            return tensor.float() - self._mapping.norm_shift
        return tensor

    def _ordered_rows(self, slot: TensorSlot, stored_name: str, start: int, stop: int) -> Weight:
        order, shape = self._stored_rows(slot), self._file.shape(stored_name)
        # a single row stored as a vector, or a row per group of heads
        if slot.role is Role.HEAD_NORM or (slot.shape[0] == 1 and len(shape) < len(slot.shape)):
            return self._file.load_rows(stored_name, 0, shape[0])
        if order is None:
            return self._file.load_rows(stored_name, start, stop)
        rows = order[start:stop]
        first = int(rows.min())
        tensor = self._file.load_rows(stored_name, first, int(rows.max()) + 1)
        rows = rows - first
        return LinearPart(tensor, None).rows(rows).weight

    def _stored_name(self, slot: TensorSlot, usual: str, present: set[str]) -> str | None:
        """Return the stored tensor that holds a slot's; None if there is none."""
        if usual in present:
            return usual
        if slot.layer is None:
            return None
        names = self._gguf_names
        if slot.expert is not None and slot.role in (Role.GATE, Role.UP):
            merged = f"{names.in_layer(slot.layer, names.experts.stacked_gate_up)}.weight"
            return merged if merged in present else None
        if slot.role is Role.LATENT_HEADS and set(self._halves(slot)) <= present:
            return self._halves(slot)[0]
        return None

    def _is_merged(self, slot: TensorSlot, stored: str) -> bool:
        """Return True if a stack holds rows of gate, then of up."""
        merged = f".{self._gguf_names.experts.stacked_gate_up}.weight"
        return slot.role in (Role.GATE, Role.UP) and stored.endswith(merged)

    def _is_halved(self, slot: TensorSlot, stored: str) -> bool:
        """Return True if keys and values of latents are separate tensors."""
        return slot.role is Role.LATENT_HEADS and stored == self._halves(slot)[0]

    def _halves(self, slot: TensorSlot) -> tuple[str, str]:
        assert slot.layer is not None
        names = self._gguf_names
        keys, values = (
            f"{names.in_layer(slot.layer, part)}.weight"
            for part in (names.latent.keys, names.latent.values)
        )
        return keys, values

    def _halves_fit(self, slot: TensorSlot) -> bool:
        assert slot.layer is not None
        spec = self._spec.latent_layers[slot.layer]
        keys, values = (tuple(self._file.shape(name)) for name in self._halves(slot))
        return keys == (spec.num_heads, spec.latent, spec.plain_dim) and values == (
            spec.num_heads,
            spec.value_dim,
            spec.latent,
        )

    def _stored_rows(self, slot: TensorSlot) -> NDArray[np.int64] | None:
        """Return each row's stored row; None if the order is the same."""
        if slot.role in (Role.QUERY, Role.KEY) and self._mapping.interleaved_rope:
            return halves_from_pairs(slot.shape[0], self._head_dim(slot))
        if slot.role is Role.QKV and self._names.qkv_by_key_head:
            assert slot.layer is not None
            return attention_rows(self._spec.attention_layers[slot.layer]).argsort()
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


def latent_heads(file: GGUFFile, keys: str, values: str) -> Tensor:
    """Read each head's key and value linears and concatenate their rows."""
    rows = []
    for head in range(file.shape(keys)[0]):
        for name in (keys, values):
            part = file.load_rows(name, 0, file.shape(name)[1], part=head)
            matrix = dense(part, "float32")
            rows.append(matrix.T if name == keys else matrix)
    return arrays.cat(rows)  # type: ignore[no-any-return]


def names_in_gguf(mapping: GGUFMapping, present: set[str]) -> TensorNames:
    """Return a mapping's names, or its other names if the first layer's norm has one of them."""
    others = mapping.other_names
    if others is not None and f"{others.in_layer(0, others.mixer_norm)}.weight" in present:
        return others
    return mapping.names


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1, which llama.cpp's converter drops."""
    return tuple(size for size in shape if size != 1)
