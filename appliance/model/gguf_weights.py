"""Presents a GGUF file's tensors under their Hugging Face names and row order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.gguf.types import held_bits
from appliance.kernels.packed import PackedWeight
from appliance.model.tensors import Role, TensorSlot, tensor_slots

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.gguf import GGUFFile
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
        return tuple(self._file.shape(self._slots[name][1]))

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a packed weight's codes; None for a tensor that loads dense."""
        stored = self._slots[name][1]
        return held_bits(self._file.type_name(stored)) if len(self.shape(name)) == 2 else None

    def is_fp8(self, name: str) -> bool:
        """Return False: GGUF has no such type."""
        return False

    def notes(self) -> tuple[str, ...]:
        """Report the loss in types that the packed form does not hold exactly."""
        losses = self._file.losses()
        if not losses:
            return ()
        each = ", ".join(f"{name} {error:.2%}" for name, error in sorted(losses.items()))
        return (f"brought into packed form with a relative error of the weights of {each}",)

    def load(self, name: str) -> Tensor | PackedWeight:
        """Read one tensor."""
        return self.load_rows(name, 0, self.shape(name)[0])

    def load_rows(self, name: str, start: int, stop: int) -> Tensor | PackedWeight:
        """Read rows `start` to `stop` of a tensor."""
        slot, stored_name = self._slots[name]
        if slot.role in (Role.QUERY, Role.KEY) and self._mapping.interleaved_rope:
            rows = halves_from_pairs(slot.shape[0], self._head_dim(slot))[start:stop]
            first = int(rows.min())
            tensor = self._file.load_rows(stored_name, first, int(rows.max()) + 1)
            rows -= first
            return tensor.rows(rows) if isinstance(tensor, PackedWeight) else tensor[rows]
        tensor = self._file.load_rows(stored_name, start, stop)
        if slot.role is Role.NORM and self._mapping.norm_shift:
            assert not isinstance(tensor, PackedWeight), name
            return tensor.float() - self._mapping.norm_shift
        return tensor

    def _head_dim(self, slot: TensorSlot) -> int:
        assert slot.layer is not None
        return self._spec.layers[slot.layer].attention.head_dim


def halves_from_pairs(num_rows: int, head_dim: int) -> Tensor:
    """Return each row's stored row, where heads are stored as interleaved pairs.

    A stored head holds rows 0, d/2, 1, d/2 + 1, ... of the head; the result (num_rows,) int64
    undoes that.
    """
    pairs = torch.arange(num_rows).view(-1, head_dim // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)
