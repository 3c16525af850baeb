"""Decides what becomes of every tensor of a model before any of them is read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import QuantizeError
from appliance.quant.formats.compressed_tensors import encoded_layout
from appliance.quant.formats.compressed_tensors_config import quantization_config
from appliance.quant.shard_writer import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from appliance.model.tensors import TensorSlot
    from appliance.quant.scheme import WeightScheme

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the model and how it will be stored.

    Attributes:
        name: in the model.
        shape: (out_features, in_features) of a linear weight.
        scheme: how it is quantized; None keeps it in 16 bits.
        stored: the tensors it becomes.
    """

    name: str
    shape: tuple[int, ...]
    scheme: WeightScheme | None
    stored: tuple[TensorLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all it becomes."""
        return sum(layout.nbytes for layout in self.stored)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Every tensor in the order of the model.

    Attributes:
        dtype: of scales and of what is not quantized.
        tensors: in the order in which the model needs them.
        kept: modules of linear weights that no group divides.
        notes: one line for each reason why weights do not get the scheme asked for.
    """

    dtype: torch.dtype
    tensors: tuple[PlannedTensor, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]

    def layouts(self) -> list[TensorLayout]:
        """Every tensor that will be stored."""
        return [layout for tensor in self.tensors for layout in tensor.stored]

    def model_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of the result, from that of the source."""
        schemes = {
            tensor.name.removesuffix(_WEIGHT): tensor.scheme
            for tensor in self.tensors
            if tensor.scheme is not None
        }
        kept = {key: value for key, value in config.items() if key != "torch_dtype"}
        return kept | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization_config": quantization_config(schemes, ["lm_head", *self.kept]),
        }


def make_plan(
    slots: Sequence[TensorSlot], scheme: WeightScheme, dtype: torch.dtype
) -> QuantizePlan:
    """Plan a model: linear weights of the layers are quantized, all else stays in 16 bits.

    Raises:
        QuantizeError: there is not one weight that the scheme fits.
    """
    tensors: list[PlannedTensor] = []
    reasons: dict[str, list[str]] = defaultdict(list)
    kept: list[str] = []
    for slot in slots:
        fitted = None
        if slot.is_linear:
            fitted, reason = scheme.fit(slot.shape[1])
            if reason:
                reasons[reason].append(slot.name)
            if fitted is None:
                kept.append(slot.name.removesuffix(_WEIGHT))
        tensors.append(_planned(slot, fitted, dtype))
    if all(tensor.scheme is None for tensor in tensors):
        raise QuantizeError(f"nothing to quantize: every linear weight is {'; '.join(reasons)}")
    notes = tuple(f"{len(names)} weights {reason}" for reason, names in reasons.items())
    return QuantizePlan(dtype, tuple(tensors), tuple(kept), notes)


def _planned(slot: TensorSlot, scheme: WeightScheme | None, dtype: torch.dtype) -> PlannedTensor:
    if scheme is None:
        layouts = {slot.name: (dtype, slot.shape)}
    else:
        layouts = encoded_layout(slot.name, (slot.shape[0], slot.shape[1]), scheme, dtype)
    stored = tuple(TensorLayout(name, *layout) for name, layout in layouts.items())
    return PlannedTensor(slot.name, slot.shape, scheme, stored)
