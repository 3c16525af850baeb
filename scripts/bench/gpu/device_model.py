"""A model of the shape of Llama-3-8B whose random weights are made on the GPU: for speed only.

Nothing is written to a disk or copied from the host, so a start takes no longer than laying the
weights out. Text never comes out of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.loading import load_parts
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.model.families.registry import family_of_config
from appliance.model.source import ModelSource
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from bench.gpu.plan import Amount
from bench.lib.synthetic_checkpoint import LLAMA_3_8B, TINY

if TYPE_CHECKING:
    from torch import Tensor

GROUP, TINY_GROUP = 128, 64
HEAD_BITS = 8
STREAMS = 64  # the most that any benchmark runs at once


class DeviceWeights:
    """Linears in 4 bits with zero points and the head in 8, or all in bf16; made when asked for."""

    def __init__(self, slots: list[TensorSlot], device: torch.device, group: int, *, dense: bool):
        self._slots = {slot.name: slot for slot in slots}
        self._device, self._group, self._dense = device, group, dense
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor_names(self) -> list[str]:
        """All tensors."""
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._slots[name].shape

    def packed_bits(self, name: str) -> int | None:
        """Bits of a code, None of a dense tensor."""
        slot = self._slots[name]
        if self._dense:
            return None
        return HEAD_BITS if slot.role is Role.HEAD else 4 if slot.is_linear else None

    def is_fp8(self, name: str) -> bool:
        """False."""
        return False

    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def load(self, name: str) -> Tensor | PackedWeight:
        """Small values, so that activations stay finite through all layers."""
        shape = self._slots[name].shape
        bits = self.packed_bits(name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        rows, columns = shape
        if bits is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            return out.normal_(std=0.5 * columns**-0.5, generator=self._generator)
        middle = 2 ** (bits - 1)
        codes = self._integers(0, 256, (rows, columns * bits // 8)).byte()
        groups = (rows, columns // self._group)
        scale = torch.full(groups, columns**-0.5 / middle, device=self._device).half()
        zero = self._integers(middle - 1, middle + 2, groups).half()
        return PackedWeight(codes, scale, zero, OffsetKind.ZERO_POINT, bits, self._group)

    def _integers(self, low: int, high: int, shape: tuple[int, int]) -> Tensor:
        return torch.randint(
            low, high, shape, device=self._device, generator=self._generator, dtype=torch.int16
        )


def config_of(amount: Amount) -> dict[str, Any]:
    """The Hugging Face config of the model that is measured."""
    return TINY if amount is Amount.TINY else LLAMA_3_8B


def model_on(device: torch.device, amount: Amount, weights: str, folder: Path) -> ModelSource:
    """The model as if it had been opened; `weights` is "int4" or "bf16"."""
    config = config_of(amount)
    family = family_of_config(config)
    spec = family.spec(config)
    group = TINY_GROUP if amount is Amount.TINY else GROUP
    slots = tensor_slots(spec, family.names)
    made = DeviceWeights(slots, device, group, dense=weights == "bf16")
    return ModelSource(folder, family, config, spec, made)


def load_engine(
    amount: Amount,
    kv: str,
    *,
    weights: str = "int4",
    graphs: str = "auto",
    kv_bytes: int | None = None,
) -> LLMEngine:
    """An engine with such a model on the first GPU, or on the CPU with torch's functions."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=folder,
            kv_cache_dtype=kv,
            kv_cache_memory=kv_bytes,
            max_num_seqs=STREAMS,
            max_num_batched_tokens=2048,
            prefix_caching=False,
            kernels="auto" if has_gpu else "torch",
            cuda_graphs=graphs,
        )
        source = model_on(device, amount, weights, Path(folder))
        return LLMEngine(*load_parts(config, (), None, lambda *progress: None, source=source))
