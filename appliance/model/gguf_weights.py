"""Presents a GGUF file's tensors under their Hugging Face names, in that row order.

llama.cpp orders value heads of Gated DeltaNet by their place under a key head first, then by key
head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from appliance.gguf.types import FLOAT_BITS, HELD_TYPES, UNPACKED_TYPES, code_bits, held_bytes
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense
from appliance.model.gguf_tensors import FUSED, OTHER_PARTS, names_of_file, unplaced
from appliance.model.linear import LinearPart
from appliance.model.recurrent_spec import GatedDeltaSpec
from appliance.model.row_orders import attention_rows, halves_from_pairs
from appliance.model.spec import AttentionSpec, ExpertsSpec
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from appliance.model.text_part import left_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.kernels.weights.weight import Weight
    from appliance.model.families.family import Family
    from appliance.model.names import GatedDeltaNames
    from appliance.model.spec import DecoderSpec

_POOLED = ("dense_2", "dense_3")  # linears that map a pooled vector
# Roles of linears, each of which may have a bias, and of a bias that only chooses experts.
_BIASED = frozenset(
    {
        Role.QUERY, Role.KEY, Role.VALUE, Role.QKV, Role.OUTPUT, Role.INPUT, Role.FILTER,
        Role.GATE, Role.UP, Role.GATE_UP, Role.DOWN, Role.ROUTER,
    }
)  # fmt: skip


class GGUFReader(ABC):
    """A file's tensors under their Hugging Face names, and the form of each in the file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """List the Hugging Face names of all tensors that are there."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, (out_features, in_features) of a linear."""

    @abstractmethod
    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        """Read rows `start` to `stop` of a tensor."""

    @abstractmethod
    def usual_name(self, name: str) -> str:
        """Return the name that a file of this architecture gives to a tensor."""

    @abstractmethod
    def unplaced(self) -> list[str]:
        """Return the file's tensors that no slot reads and that are not known to be unused."""

    @abstractmethod
    def _matrix(self, name: str) -> str | None:
        """Return the stored tensor of a matrix that is not computed from others."""

    def load(self, name: str) -> Weight:
        shape = self.shape(name)
        return self.load_rows(name, 0, shape[0] if shape else 1)

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a matrix's codes as kernels hold them; None if it loads dense."""
        stored = self._matrix(name)
        return None if stored is None else code_bits(self._file.type_name(stored))

    def group_size(self, name: str) -> int | None:
        """Return None: `held_bytes` says what blocks take."""
        return None

    def float_bits(self, name: str) -> int | None:
        """Return the bits of a weight's floating-point codes; None if it has none."""
        stored = self._matrix(name)
        return None if stored is None else FLOAT_BITS.get(self._file.type_name(stored))

    def held_bytes(self, name: str) -> float:
        """Return a matrix's bytes per weight as kernels hold it, scales included."""
        stored = self._matrix(name)
        assert stored is not None, f"{name} is no matrix"
        return held_bytes(self._file.type(stored))

    def is_held(self, name: str) -> bool:
        """Return True if a matrix is multiplied in blocks of a GGML type."""
        stored = self._matrix(name)
        return stored is not None and self._file.type_name(stored) in {*HELD_TYPES, *UNPACKED_TYPES}

    def notes(self) -> tuple[str, ...]:
        """Say what is left out."""
        others = sum(name.startswith(OTHER_PARTS) for name in self._file.tensor_names())
        return left_out(others)


class GGUFWeights(GGUFReader):
    """Tensors of a family's model; quantized ones keep their codes.

    Args:
        beside: tensors beside the decoder's, by their names in the file.
    """

    def __init__(
        self,
        file: GGUFFile,
        family: Family,
        spec: DecoderSpec,
        beside: Mapping[str, TensorSlot] | None = None,
    ) -> None:
        assert family.gguf is not None
        super().__init__(file)
        present = set(file.tensor_names())
        self._mapping = family.gguf
        self._names, self._gguf_names = names_of_file(family, present)
        self._spec = spec
        slots = tensor_slots(spec, self._names)
        usual = tensor_slots(spec, self._gguf_names)
        self._usual = {slot.name: own.name for slot, own in zip(slots, usual, strict=True)}
        self._usual |= {slot.name: stored for stored, slot in (beside or {}).items()}
        slots += (beside or {}).values()
        found = (self._find(slot, self._usual[slot.name], present) for slot in slots)
        self._places = {place.slot.name: place for place in found if place is not None}
        self._scales = self._find_scales(present)

    def tensor_names(self) -> list[str]:
        return list(self._places)

    def of_block(
        self,
        block: int,
        family: Family,
        spec: DecoderSpec,
        last_norm: str,
        beside: Mapping[str, TensorSlot],
    ) -> GGUFWeights | None:
        """Return a decoder of one layer that a block behind the model's layers holds.

        Args:
            family: the model's, with names of the decoder.
            spec: of one layer.
            last_norm: name of its last norm within the block, without `.weight`.
            beside: tensors beside the decoder's, by their names within the block.

        Returns:
            None if the block has none of the tensors beside.
        """
        prefix = self._gguf_names.layer.format(block)
        stored = {f"{prefix}{name}": slot for name, slot in beside.items()}
        if not stored.keys() & set(self._file.tensor_names()):
            return None
        names = replace(self._gguf_names, layer=prefix, final_norm=f"{prefix}{last_norm}")
        mapping = replace(self._mapping, names=names, other_names=None, own_names=None)
        return GGUFWeights(self._file, replace(family, gguf=mapping), spec, stored)

    def usual_name(self, name: str) -> str:
        return self._usual[name]

    def unplaced(self) -> list[str]:
        held = {place.stored for place in self._places.values()} | set(self._scales.values())
        for place in self._places.values():
            if place.slot.role is Role.LATENT_HEADS:  # some files have both forms of it
                held |= set(self._halves(place.slot))
        left = [name for name in self._file.tensor_names() if name not in held]
        settings, prefix = self._file.metadata, f"{self._mapping.architecture}."
        blocks = settings.get(f"{prefix}block_count", 0)
        linears = [name for name in _POOLED if f"{prefix}{name}_feat_out" in settings]
        elsewhere = {f"{name}.weight" for name in linears}
        return unplaced(left, self._spec, self._gguf_names, blocks, elsewhere)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        slot, stored = place.slot, place.stored
        if stored is None:
            return slot.shape
        shape = tuple(self._file.shape(stored))
        if slot.role in (Role.FILTER, Role.ROUTER, Role.RATE):
            return slot.shape if squeezed(shape) == squeezed(slot.shape) else shape
        if slot.role is Role.HEAD_NORM:  # a row per group of heads
            return slot.shape if prod(shape) == prod(slot.shape) else shape
        if self._is_halved(slot, stored):
            return slot.shape if self._halves_fit(slot) else shape
        if slot.expert is not None:
            # One tensor holds all experts; a wrong number of them fits no expert's shape.
            if shape[:1] != (self._num_experts(slot),):
                return shape
            shape = shape[1:]
        return (*slot.shape[:1], *shape[1:]) if shape[:1] == (place.rows,) else shape

    def block_size(self, name: str) -> int:
        """Return the number of inputs that share scales in the file."""
        stored = self._places[name].stored
        return 1 if stored is None else self._file.type(stored).block_size

    def _matrix(self, name: str) -> str | None:
        place = self._places[name]
        if place.stored is None or self._is_halved(place.slot, place.stored):
            return None
        return place.stored if len(self.shape(name)) == 2 else None

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        weight = self._load_rows(name, start, stop)
        stored = self._places[name].stored
        if stored not in self._scales:
            return weight
        assert isinstance(weight, Fp4Weight), name
        scales = dense(self._file.load(self._scales[stored]), "float32").reshape(-1)
        factor = scales[self._places[name].slot.expert or 0]
        return replace(weight, row_scale=weight.row_scale * factor)

    def _load_rows(self, name: str, start: int, stop: int) -> Weight:
        place = self._places[name]
        slot, stored_name = place.slot, place.stored
        if stored_name is None:
            return self._file.zeros(stop - start)
        if self._is_halved(slot, stored_name):
            return latent_heads(self._file, *self._halves(slot))[start:stop]
        if slot.expert is not None:
            start, stop = place.first + start, place.first + stop
            return self._file.load_rows(stored_name, start, stop, part=slot.expert)
        tensor = self._ordered_rows(place, stored_name, start, stop)
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
        if slot.is_norm_weight and self._mapping.norm_shift:
            assert arrays.is_array(tensor), name
            return tensor.float() - self._mapping.norm_shift
        return tensor

    def _ordered_rows(self, place: _Place, stored_name: str, start: int, stop: int) -> Weight:
        slot, offset = place.slot, place.first
        order, shape = self._stored_rows(slot), self._file.shape(stored_name)
        # a single row stored as a vector, or a row per group of heads
        if slot.role is Role.HEAD_NORM or (slot.shape[0] == 1 and len(shape) < len(slot.shape)):
            return self._file.load_rows(stored_name, 0, shape[0])
        if order is None:
            return self._file.load_rows(stored_name, offset + start, offset + stop)
        rows = offset + order[start:stop]
        first = int(rows.min())
        tensor = self._file.load_rows(stored_name, first, int(rows.max()) + 1)
        rows = rows - first
        return LinearPart(tensor, None).rows(rows).weight

    def _find_scales(self, present: set[str]) -> dict[str, str]:
        """Return the factors of whole weights, one or one per expert, by the weights' names."""
        stored = {place.stored for place in self._places.values()}
        named = {name: f"{name.removesuffix('weight')}scale" for name in stored - {None} if name}
        return {
            name: scale
            for name, scale in named.items()
            if scale in present - stored and self._file.type_name(name) == "NVFP4"
        }

    def _find(self, slot: TensorSlot, usual: str, present: set[str]) -> _Place | None:
        """Return the place of a slot's numbers; None if the file lacks them."""
        # Ollama's converter leaves out the ending of biases that belong to no linear.
        for name in (usual, usual.removesuffix(".bias")):
            if name in present:
                return _Place(slot, name)
        if slot.layer is None:
            return None
        names = self._gguf_names
        if slot.expert is not None and slot.role in (Role.GATE, Role.UP):
            merged = f"{names.in_layer(slot.layer, names.experts.stacked_gate_up)}.weight"
            rows = slot.shape[0]  # of gate, then as many of up
            first = rows if slot.role is Role.UP else 0
            return _Place(slot, merged, first, 2 * rows) if merged in present else None
        if slot.role is Role.LATENT_HEADS and set(self._halves(slot)) <= present:
            return _Place(slot, self._halves(slot)[0])
        if (fused := self._find_fused(slot, present)) is not None:
            return fused
        is_bias = len(slot.shape) == 1 and slot.role in _BIASED and usual.endswith(".bias")
        return _Place(slot, None) if is_bias and slot.expert is None else None

    def _find_fused(self, slot: TensorSlot, present: set[str]) -> _Place | None:
        """Return the place of a part of attention in a tensor of all three."""
        assert slot.layer is not None
        mixer = self._spec.layers[slot.layer].mixer
        if slot.role not in (Role.QUERY, Role.KEY, Role.VALUE):
            return None
        if not isinstance(mixer, AttentionSpec) or len(self._names.qkv) == 1:
            return None
        kind = "bias" if len(slot.shape) == 1 else "weight"
        fused = f"{self._gguf_names.in_layer(slot.layer, FUSED)}.{kind}"
        if fused not in present:
            return None
        queries = mixer.num_heads * mixer.head_dim * (2 if mixer.output_gate else 1)
        keys = mixer.num_kv_heads * mixer.head_dim
        first = {Role.QUERY: 0, Role.KEY: queries, Role.VALUE: queries + keys}[slot.role]
        return _Place(slot, fused, first, queries + 2 * keys)

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


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a slot's numbers in a file.

    Attributes:
        stored: the file's tensor; None for a bias that it lacks, which is zero.
        first: row of that tensor, or of an expert's matrix in it, where the slot begins.
        rows: rows that it must have to hold other slots too; None: it is the slot's alone.
    """

    slot: TensorSlot
    stored: str | None
    first: int = 0
    rows: int | None = None


def latent_heads(file: GGUFFile, keys: str, values: str) -> Tensor:
    """Read each head's key and value linears and concatenate their rows."""
    rows = []
    for head in range(file.shape(keys)[0]):
        for name in (keys, values):
            part = file.load_rows(name, 0, file.shape(name)[1], part=head)
            matrix = dense(part, "float32")
            rows.append(matrix.T if name == keys else matrix)
    return arrays.cat(rows)  # type: ignore[no-any-return]


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1, which llama.cpp's converter drops."""
    return tuple(size for size in shape if size != 1)


def stored_rows(
    part: str, names: GatedDeltaNames, spec: GatedDeltaSpec
) -> NDArray[np.int64] | None:
    """Return each row's stored row, (out_features,) int64; None if the order is the same.

    `part` is the tensor's name in its layer, without `.weight`.
    """
    if part in (names.qkv, names.filter):
        before = 2 * spec.keys
        return np.concatenate((np.arange(before), before + _tiled(spec, spec.value_dim)))
    if part == names.gate:
        return _tiled(spec, spec.value_dim)
    if part in (names.share, names.decay, names.log_rates, names.decay_bias):
        return _tiled(spec, 1)
    return None


def as_in_checkpoints(
    tensor: Weight, part: str, names: GatedDeltaNames, spec: GatedDeltaSpec
) -> Weight:
    """Restore the order of the last linear's inputs.

    Packed columns keep their place and get an `input_order`.
    """
    if part != names.output:
        return tensor
    stored = _tiled(spec, spec.value_dim)
    if isinstance(tensor, PackedWeight | GgmlWeight):
        held = tensor.codes if isinstance(tensor, PackedWeight) else tensor.blocks
        order = arrays.like(held, stored.argsort().astype(np.int32))
        return replace(tensor, input_order=order)
    if isinstance(tensor, Fp4Weight):
        if spec.value_dim % tensor.group_size:
            return tensor.dequantize()[:, stored]
        heads = _tiled(spec, 1)
        return replace(
            tensor,
            codes=_of_heads(tensor.codes, heads),
            scale=arrays.viewed(
                _of_heads(arrays.viewed(tensor.scale, "uint8"), heads), tensor.scale.dtype
            ),
        )
    assert arrays.is_array(tensor), part
    return tensor[:, stored]


def _of_heads(columns: Tensor, order: NDArray[np.int64]) -> Tensor:
    """Reorder columns (out_features, heads * width) by head."""
    rows = columns.shape[0]
    ordered: Tensor = columns.reshape(rows, len(order), -1)[:, order].reshape(rows, -1)
    return ordered


def _tiled(spec: GatedDeltaSpec, width: int) -> NDArray[np.int64]:
    """Return each element's stored place; a value head has `width` elements."""
    shared = spec.num_value_heads // spec.num_key_heads
    stored = np.arange(spec.num_value_heads * width).reshape(shared, spec.num_key_heads, width)
    return stored.swapaxes(0, 1).reshape(-1)
