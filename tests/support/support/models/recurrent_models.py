"""Small models with recurrent layers, and steps of several sequences on any executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from support.models.teacher_forcing import BLOCK_SIZE

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", LFM2 | {"block_multiple_of": 8}),
    "lfm2-bias": ("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 8}),
    "lfm2_moe": (
        "lfm2_moe",
        LFM2
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.3,
        },
    ),
}
# Windows, a part of a head that turns, norms behind each part, gates of heads.
RECURRENT["lfm3"] = (
    "lfm3",
    {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "conv_L_cache": 5,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
)
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
RECURRENT |= {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_next": (
        "qwen3_next",
        DELTA
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        DELTA
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
    ),
}
MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
GRANITE = MAMBA2 | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
RECURRENT |= {
    "granite4": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "granite4-dense": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    # A layer is a mixer or an MLP: two mixers side by side, an MLP at the end.
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": [
                "linear_attention", "moe", "linear_attention",
                "full_attention", "mlp", "linear_attention", "mlp",
            ],
            "mamba_num_heads": 4,
            "mamba_head_dim": 48,
            "ssm_state_size": 32,
            "n_groups": 2,
            "conv_kernel": 3,
            "time_step_min": 1e-9,  # bounds steps of prompts in transformers, though not of answers
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.3,
        },
    ),
    # As Nemotron 3 Super: experts between two linears of their own.
    "nemotron_h-latent": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 48,
            "ssm_state_size": 32,
            "n_groups": 2,
            "conv_kernel": 3,
            "time_step_min": 1e-9,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.3,
        },
    ),
    "bamba": ("bamba", MAMBA2 | {"attn_layer_indices": [1], "num_attention_heads": 4}),
}  # fmt: skip
SIZES = {"head_dim": 16, "hidden_size": 64}


@dataclass
class Running:
    """A sequence under way: its tokens, its blocks, its slot, and how many are computed."""

    token_ids: Sequence[int]
    table: tuple[int, ...]
    slot: int
    computed: int = 0


def allocate(decoder: Any, *, num_blocks: int, num_states: int) -> Any:
    """A float32 cache whose state slots hold the leavings of others."""
    cache = decoder.allocate_cache(
        KVFormat.FP32, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_states=num_states
    )
    if cache.states.numel():
        cache.states.view(decoder.spec.state_format.dtype)[:] = 1e4
    return cache


def advance(decoder: Any, cache: Any, steps: Sequence[tuple[Running, int]]) -> list[Tensor]:
    """Run some rows of each sequence in one step; return the logits of each."""
    spans = [(running, running.computed, running.computed + rows) for running, rows in steps]
    logits = decoder.forward(
        torch.tensor([token for run, start, end in spans for token in run.token_ids[start:end]]),
        torch.cat([torch.arange(start, end) for _, start, end in spans]),
        RaggedBatch.of(
            [end - start for _, start, end in spans],
            [end for _, _, end in spans],
            [running.table for running, _, _ in spans],
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
            state_slots=[running.slot for running, _, _ in spans],
        ),
        cache,
    )
    for running, _, end in spans:
        running.computed = end
    return list(logits.split([rows for _, rows in steps]))


def logits_in_steps(decoder: Any, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of a sequence that runs alone, cut into steps."""
    cache = allocate(decoder, num_blocks=8, num_states=3)
    running = Running(token_ids, (5, 2, 7), slot=1)
    return torch.cat([advance(decoder, cache, [(running, rows)])[0] for rows in chunks])
