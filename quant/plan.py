"""Decides what becomes of every tensor of a model before any of them is read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import QuantizeError
from appliance.quant.formats.compressed_tensors import encode, encoded_layout
from appliance.quant.formats.compressed_tensors_config import quantization_config
from appliance.quant.formats.word_writer import awq_writer, gptq_writer
from appliance.quant.options import WeightFormat
from appliance.quant.shard_writer import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.packed import PackedWeight
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.word_writer import Weights, WordWriter
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
        words: stores weights as AWQ or GPTQ; None stores them as compressed-tensors.
    """

    dtype: torch.dtype
    tensors: tuple[PlannedTensor, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]
    words: WordWriter | None = None

    def layouts(self) -> list[TensorLayout]:
        """Every tensor that will be stored."""
        return [layout for tensor in self.tensors for layout in tensor.stored]

    def encode(self, name: str, weight: PackedWeight) -> dict[str, Tensor]:
        """The tensors that store a quantized weight."""
        return encode(name, weight) if self.words is None else self.words.encode(name, weight)

    def model_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of the result, from that of the source."""
        schemes = {
            tensor.name.removesuffix(_WEIGHT): tensor.scheme
            for tensor in self.tensors
            if tensor.scheme is not None
        }
        kept = {key: value for key, value in config.items() if key != "torch_dtype"}
        ignore = ["lm_head", *self.kept]
        stored = (
            quantization_config(schemes, ignore)
            if self.words is None
            else self.words.config(ignore)
        )
        return kept | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization_config": stored,
        }


def make_plan(
    slots: Sequence[TensorSlot],
    scheme: WeightScheme,
    dtype: torch.dtype,
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS,
) -> QuantizePlan:
    """Plan a model: linear weights of the layers are quantized, all else stays in 16 bits.

    Raises:
        ConfigError: the format cannot hold the weights.
        QuantizeError: there is not one weight that the scheme fits.
    """
    found: dict[str, WeightScheme | None] = {}
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
        found[slot.name] = fitted
    if not any(found.values()):
        raise QuantizeError(f"nothing to quantize: every linear weight is {'; '.join(reasons)}")
    notes = tuple(f"{len(names)} weights {reason}" for reason, names in reasons.items())
    words = make_writer(format, slots, found)
    tensors = tuple(_planned(slot, found[slot.name], dtype, words) for slot in slots)
    return QuantizePlan(dtype, tensors, tuple(kept), notes, words)


def make_writer(
    format: WeightFormat, slots: Sequence[TensorSlot], schemes: Mapping[str, WeightScheme | None]
) -> WordWriter | None:
    """What stores weights of those schemes as AWQ or GPTQ; None for compressed-tensors.

    Raises:
        ConfigError: the format cannot hold them.
    """
    if format is WeightFormat.COMPRESSED_TENSORS:
        return None
    weights: Weights = {}
    for slot in slots:
        scheme = schemes.get(slot.name)
        if scheme is not None:
            weights[slot.name] = (slot.shape[0], slot.shape[1]), scheme
    return awq_writer(weights) if format is WeightFormat.AWQ else gptq_writer(weights)


def _planned(
    slot: TensorSlot, scheme: WeightScheme | None, dtype: torch.dtype, words: WordWriter | None
) -> PlannedTensor:
    if scheme is None:
        layouts = {slot.name: (dtype, slot.shape)}
    elif words is not None:
        layouts = words.layout(slot.name, (slot.shape[0], slot.shape[1]))
    else:
        layouts = encoded_layout(slot.name, (slot.shape[0], slot.shape[1]), scheme, dtype)
    stored = tuple(TensorLayout(name, *layout) for name, layout in layouts.items())
    return PlannedTensor(slot.name, slot.shape, scheme, stored)
