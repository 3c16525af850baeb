"""A request for memory to plan with: a small dense model on a CPU."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.memory.plan import MemoryRequest
from appliance.kernels.activation import Activation
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)

MIB = 2**20


def memory_request(**changes: object) -> MemoryRequest:
    attention = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, rope=RopeSpec(1e4, 64)
    )
    layer = LayerSpec(attention, MLPSpec(512, Activation.SILU), NormSpec(1e-6))
    spec = DecoderSpec(
        architecture="llama",
        hidden_size=256,
        vocab_size=1000,
        context_length=8192,
        layers=(layer,) * 4,
        final_norm=NormSpec(1e-6),
        tied_head=True,
    )
    base = MemoryRequest(
        spec=spec,
        weight_bytes=100 * MIB,
        kv_bytes_per_token=4 * 2 * 2 * 64 * 2,
        kv_format="bf16",
        block_size=16,
        activation_bytes=2,
        budget_bytes=300 * MIB,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=None,
        kv_cache_memory=None,
        fill=False,
    )
    found = replace(base, **changes)  # type: ignore[arg-type]
    return replace(found, state_bytes=found.spec.state_bytes)
