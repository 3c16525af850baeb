"""Models of a known shape with random weights, for speed only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.model.source import ModelSource
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from bench.lib.families import family_of_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme


@dataclass(frozen=True, slots=True)
class Schemes:
    """Schemes of the linears of all layers, the head and the embedding; None is bfloat16."""

    layers: WeightScheme | None = None
    head: WeightScheme | None = None
    embedding: WeightScheme | None = None

    def of(self, slot: TensorSlot) -> WeightScheme | None:
        """Return the scheme of one tensor."""
        if slot.role is Role.HEAD:
            return self.head
        if slot.role is Role.EMBEDDING:
            return self.embedding
        return self.layers if slot.is_linear else None


class SyntheticWeights:
    """A `WeightSource` that makes each tensor on the device when it is loaded."""

    def __init__(self, slots: list[TensorSlot], schemes: Schemes, device: torch.device) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._schemes = schemes
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor_names(self) -> list[str]:
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slots[name].shape

    def packed_bits(self, name: str) -> int | None:
        """Bits of a code; None for a dense tensor."""
        scheme = self._schemes.of(self._slots[name])
        return None if scheme is None else scheme.bits

    def group_size(self, name: str) -> int | None:
        scheme = self._schemes.of(self._slots[name])
        return None if scheme is None else scheme.group_size

    def float_bits(self, name: str) -> int | None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def load(self, name: str) -> Tensor | PackedWeight:
        slot = self._slots[name]
        return random_weight(slot.shape, self._schemes.of(slot), self._generator)


def synthetic_model(
    folder: Path, config: dict[str, Any], schemes: Schemes, device: torch.device
) -> ModelSource:
    """Return a model of that config as if it had been opened at `folder`."""
    family = family_of_config(config)
    spec = family.spec(config)
    weights = SyntheticWeights(tensor_slots(spec, family.names), schemes, device)
    return ModelSource(folder, family, config, spec, weights)


def random_weight(
    shape: tuple[int, ...],
    scheme: WeightScheme | None,
    generator: torch.Generator,
    scale_dtype: torch.dtype = torch.float16,
) -> Tensor | PackedWeight:
    """Make a tensor on the generator's device, so small that activations stay finite."""
    device = generator.device
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    columns = shape[-1]
    if scheme is None:
        # `normal_` in bf16 at once: the float32 values of a head would take gigabytes
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return out.normal_(std=0.5 * columns**-0.5, generator=generator)
    rows, group = shape[0], scheme.group_size or columns
    code_bytes = (rows, columns * scheme.code_bits // 8)
    codes = torch.randint(0, 256, code_bytes, dtype=torch.uint8, device=device, generator=generator)
    groups = (rows, columns // group)
    scale = torch.full(groups, columns**-0.5 / scheme.zero_code, device=device).to(scale_dtype)
    if scheme.symmetric:
        offset, kind = -scheme.zero_code * scale, OffsetKind.ADDITIVE
    else:
        low, high = scheme.zero_code - 1, scheme.zero_code + 2
        offset = torch.randint(low, high, groups, device=device, generator=generator)
        offset, kind = offset.to(scale_dtype), OffsetKind.ZERO_POINT
    return PackedWeight(codes, scale, offset, kind, scheme.bits, group)
