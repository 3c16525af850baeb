"""Signatures that spoil shipped kernels, one way each, so that the gates are seen to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention.spec import SHAPES, attention_signature
from appliance.kernels.paged_attention.variant import Phase, Tile
from appliance.kernels.signature import KernelSignature

LLAMA = SHAPES[1]


def signatures(capability: int) -> Iterator[KernelSignature]:
    if capability != 86:
        return
    decode = attention_signature(LLAMA, Phase.DECODE, torch.bfloat16, KVFormat.INT8, capability)
    yield replace(decode, name="planted: too few registers", max_registers=32)
    yield replace(decode, name="planted: no promise of alignment", aligned=False)
    large = attention_signature(
        LLAMA, Phase.PREFILL, torch.bfloat16, KVFormat.BF16, capability, Tile(128, 128, 8, 5)
    )
    yield replace(large, name="planted: too much shared memory")
