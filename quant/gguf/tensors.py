"""Places a checkpoint's tensors in a GGUF file: names, types and the order of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.model.gguf_tensors import names_beside
from appliance.model.row_orders import halves_from_pairs
from appliance.model.tensors import Role, tensor_slots

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.families.family import Family, GGUFMapping
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


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
