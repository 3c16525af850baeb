"""Places a checkpoint's tensors and settings in a GGUF file: names, types, the order of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.errors import QuantizeError
from appliance.model.gguf_tensors import names_beside
from appliance.model.row_orders import halves_from_pairs
from appliance.model.tensors import Role, tensor_slots
from appliance.model_files.gguf_names import parts_of
from gguf import GGUFReader, GGUFValueType

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.families.family import Family, GGUFMapping
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

# Part of the file's own header, or not true of other weights.
_OWN = (
    "GGUF.",
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "split.",
)
_NEEDED = "tokenizer.ggml."
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of the file.

    Attributes:
        slot: the checkpoint's.
        name: the file's.
        order: the checkpoint's row at each of the file's; None if the order is the same.
        shift: constant that the file adds to its numbers.
    """

    slot: TensorSlot
    name: str
    order: NDArray[np.int64] | None
    shift: float


def mapping_of(family: Family) -> GGUFMapping | None:
    """Return the mapping of a family's files, which may be labelled as another family's."""
    return family.gguf or family.labelled


def file_tensors(source: ModelSource) -> list[FileTensor]:
    """List a checkpoint's tensors as its GGUF file has them, in the order of use.

    Raises:
        QuantizeError: no GGUF file of such a model is written here.
    """
    mapping, spec = mapping_of(source.family), source.spec
    if mapping is None or source.fallback is not None:
        raise QuantizeError(
            f"{source.path} is a {spec.architecture} model, whose GGUF files are not known here;"
            " use --format compressed-tensors"
        )
    if spec.has_experts or spec.state_bytes or spec.latent_layers or not spec.goes_layer_by_layer:
        raise QuantizeError(
            f"{source.path} has experts, recurrent layers, latent attention or embeddings of each"
            " layer, whose tensors are not written as GGUF; use --format compressed-tensors"
        )
    stored = set(source.weights.tensor_names())
    own = source.family.names
    pairs = zip(
        tensor_slots(spec, own), tensor_slots(spec, names_beside(own, mapping.names)), strict=True
    )
    return [
        FileTensor(
            slot,
            named.name,
            _stored_order(source, slot, mapping),
            mapping.norm_shift if slot.is_norm_weight else 0.0,
        )
        for slot, named in pairs
        if slot.name in stored
    ]


def _stored_order(
    source: ModelSource, slot: TensorSlot, mapping: GGUFMapping
) -> NDArray[np.int64] | None:
    if slot.role not in (Role.QUERY, Role.KEY) or not mapping.interleaved_rope:
        return None
    assert slot.layer is not None
    head_dim = source.spec.attention_layers[slot.layer].head_dim
    return halves_from_pairs(slot.shape[0], head_dim).argsort()


@dataclass(frozen=True, slots=True)
class FileSetting:
    """One key, its value, its type and that of the elements of a list."""

    key: str
    value: Any
    kind: GGUFValueType
    inner: GGUFValueType | None = None

    @classmethod
    def of(cls, key: str, value: bool | float | str | list[Any]) -> FileSetting:
        """Choose the type by the value: u32 for whole numbers, i32 for those in lists, f32."""
        if isinstance(value, list):
            inner = GGUFValueType.INT32 if type(value[0]) is int else _kind_of(value[0])
            return cls(key, value, GGUFValueType.ARRAY, inner)
        return cls(key, value, _kind_of(value))


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is written as its source stores it.

    Attributes:
        kind: its type's name.
        data: uint8, mapped from the source.
    """

    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileSettings:
    """All of a file but its weights.

    Attributes:
        extra: float32 tensors that are settings, such as factors of frequencies.
        heads: tensors of the blocks behind the layers, with which the model drafts (`nextn`).
    """

    architecture: str
    settings: tuple[FileSetting, ...]
    extra: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    heads: dict[str, KeptTensor] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path) -> FileSettings:
        """Copy those of a GGUF model, whose first file has them.

        Empty lists are left out, which the `gguf` package does not write.

        Raises:
            QuantizeError: a list that readers need is empty, or holds lists.
        """
        first, *others = parts_of(path)
        reader = GGUFReader(first)
        found = []
        for entry in reader.fields.values():
            if entry.name.startswith(_OWN):
                continue
            kind, *inner = entry.types
            value = entry.contents() if len(inner) <= 1 else None
            if value is None or (value == [] and entry.name.startswith(_NEEDED)):
                what = "lists of lists" if value is None else "an empty list"
                raise QuantizeError(
                    f"{path} has {what} in {entry.name}, which is not written to GGUF files; use"
                    " --format compressed-tensors"
                )
            if value != []:
                found.append(FileSetting(entry.name, value, kind, inner[0] if inner else None))
        tensors = [one for part in (reader, *map(GGUFReader, others)) for one in part.tensors]
        extra = {one.name: one.data.copy() for one in tensors if one.name.startswith("rope_")}
        architecture = str(reader.fields["general.architecture"].contents())
        values = {one.key.removeprefix(f"{architecture}."): one.value for one in found}
        count = values.get("nextn_predict_layers", 0)
        layers = values["block_count"] - count if count else None
        heads = {
            one.name: KeptTensor(
                tuple(int(size) for size in reversed(one.shape)),
                one.tensor_type.name,
                one.data.reshape(-1).view("uint8"),
            )
            for one in tensors
            if layers is not None and _is_behind(one.name, layers)
        }
        return cls(architecture, tuple(found), extra, heads)


def _is_behind(name: str, layers: int) -> bool:
    block = _BLOCK.match(name)
    return block is not None and int(block[1]) >= layers


def _kind_of(value: object) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING
