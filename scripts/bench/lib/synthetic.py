"""Models of a known shape with random packed weights: for speed, never for text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.model.families.registry import family_of_config
from appliance.model.source import ModelSource
from appliance.model.tensors import Role, TensorSlot, tensor_slots

if TYPE_CHECKING:
    from torch import Tensor

# https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


class SyntheticWeights:
    """Linears of layers in 4 bits and groups of 64, the embedding in 8 bits and groups of 32."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._generator = torch.Generator().manual_seed(0)

    def tensor_names(self) -> list[str]:
        """All tensors."""
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._slots[name].shape

    def packed_bits(self, name: str) -> int | None:
        """Bits of a code, None of a dense tensor."""
        slot = self._slots[name]
        if slot.role in (Role.EMBEDDING, Role.HEAD):
            return 8
        return 4 if slot.is_linear else None

    def is_fp8(self, name: str) -> bool:
        """False."""
        return False

    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def load(self, name: str) -> Tensor | PackedWeight:
        """Make a tensor; small values, so that activations stay finite through all layers."""
        shape = self._slots[name].shape
        bits = self.packed_bits(name)
        if bits is None:
            return torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        rows, columns = shape
        group = 64 if bits == 4 else 32
        codes = torch.randint(
            0, 256, (rows, columns * bits // 8), dtype=torch.uint8, generator=self._generator
        )
        scale = torch.full((rows, columns // group), columns**-0.5 / 2 ** (bits - 1)).half()
        return PackedWeight(
            codes=codes,
            scale=scale,
            offset=scale * -(2 ** (bits - 1)),
            offset_kind=OffsetKind.ADDITIVE,
            bits=bits,
            group_size=group,
        )


def synthetic_model(name: str) -> ModelSource:
    """A model of `CONFIGS`."""
    config = CONFIGS[name]
    family = family_of_config(config)
    spec = family.spec(config)
    weights = SyntheticWeights(tensor_slots(spec, family.names))
    return ModelSource(Path(name), family, config, spec, weights)
