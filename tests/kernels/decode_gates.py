"""Decode over every kind of page, and signatures that spoil it: the gates have to see them fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention.spec import FORMATS, LLAMA, attention_signature
from appliance.kernels.paged_attention.variant import Phase
from appliance.kernels.signature import KernelSignature


def signatures(capability: int) -> Iterator[KernelSignature]:
    for kv_format in FORMATS:
        found = attention_signature(LLAMA, Phase.DECODE, torch.bfloat16, kv_format, capability)
        yield replace(found, name=kv_format.value)
        if kv_format is KVFormat.INT8 and capability == 86:
            # Plain casts of codes instead of the few instructions that make halves of them.
            by_cast = {**found.constexprs, "ASM": "none"}
            yield replace(found, name="planted: codes by cast", constexprs=by_cast)
            # The order of the codes is that of one warp's registers.
            yield replace(found, name="planted: another order of codes", num_warps=2)
