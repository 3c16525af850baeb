"""A decode step reads only the weights of the experts that its rows chose."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from support.models.teacher_forcing import logits_of

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.structs import ExpertsStruct, LinearStruct
from appliance.kernels.cpu.weight_bytes import linear_bytes
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.model.native import NativeDecoder
from appliance.model.native_loader import load_native
from appliance.model.source import ModelSource
from appliance.model.tensors import TensorSlot, tensor_slots
from bench.lib.families import family_of_config

PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = 41, 42
CLEAR_REFS = Path("/proc/self/clear_refs")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


class RandomWeights:
    """Experts in 4 bits, all else in float32."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._generator = torch.Generator().manual_seed(0)

    def tensor_names(self) -> list[str]:
        return list(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slots[name].shape

    def packed_bits(self, name: str) -> int | None:
        return None if self._slots[name].expert is None else 4

    def group_size(self, name: str) -> int | None:
        return None

    def float_bits(self, name: str) -> int | None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def load(self, name: str) -> torch.Tensor | PackedWeight:
        shape = self.shape(name)
        if self.packed_bits(name) is None:
            random = torch.randn(shape, generator=self._generator)
            return random.mul_(shape[-1] ** -0.5)
        codes = (shape[0], shape[1] // 2)
        scale = torch.full((shape[0], shape[1] // 32), 0.01, dtype=torch.float16)
        return PackedWeight(
            torch.randint(0, 256, codes, dtype=torch.uint8, generator=self._generator),
            scale,
            -8 * scale,
            OffsetKind.ADDITIVE,
            4,
            32,
        )


@pytest.fixture
def decoder() -> object:
    libc = ctypes.CDLL(None)
    before = libc.prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0)
    if before < 0 or libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        pytest.skip("this kernel has no way to leave out large pages")
    family = family_of_config(CONFIG)
    spec = family.spec(CONFIG)
    weights = RandomWeights(tensor_slots(spec, family.names))
    source = ModelSource(Path("random"), family, {}, spec, weights)
    loaded = load_native(source, NativeEngine(load_library(), 1), torch.float32)
    libc.prctl(PR_SET_THP_DISABLE, before, 0, 0, 0)
    return loaded


def referenced_bytes(address: int) -> int:
    """Bytes in pages of the mapping at `address` that were touched since the last reset."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head is not None:
            found = int(head[1], 16) <= address < int(head[2], 16)
        elif found and line.startswith("Referenced:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_decode_step_reads_the_chosen_experts_only(decoder: NativeDecoder) -> None:
    """The system counts the pages that a step of one token touches."""
    try:
        CLEAR_REFS.write_text("1")
    except OSError:
        pytest.skip("this system does not say which pages were touched")
    experts = ExpertsStruct.from_address(decoder.model.layers[0].experts)
    first = LinearStruct.from_address(experts.gate)
    expert_bytes = 3 * linear_bytes(first)
    logits_of(decoder, [5])  # allocates the workspace
    CLEAR_REFS.write_text("1")
    logits_of(decoder, [5])
    touched = referenced_bytes(first.codes)
    beside = decoder.weight_bytes - 64 * expert_bytes
    needed = beside + 4 * expert_bytes
    assert touched <= 1.15 * needed, (touched, needed)
    assert touched >= 4 * expert_bytes
    assert 64 * expert_bytes > 5 * needed  # reading all of them would show

    logits_of(decoder, list(range(60)))
    assert referenced_bytes(first.codes) > 3 * needed  # the count includes other tokens' choices
