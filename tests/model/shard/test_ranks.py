"""The parts of a model, run concurrently, give the logits of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.native_models import LIBRARY, native
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of
from support.ranks.rank_threads import RankThreads

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.shard.shard import undivided
from appliance.model.shard.split import Split
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDE = {"intermediate_size": 160, "head_dim": 16, "vocab_size": 161}
THREE_KEY_HEADS = RECURRENT["qwen3_5"][1] | {
    "hidden_size": 64,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
}
# Each case has a feature that no other has.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True}, "1:1"),
    "llama-2:1": ("llama", WIDE | {"num_key_value_heads": 3}, "2:1"),
    "llama-3:1": (
        "llama",
        WIDE | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
        "3:1",
    ),
    "llama-three": ("llama", WIDE | {"num_key_value_heads": 6}, "1:1:1"),
    "one key head": (
        "llama",
        WIDE | {"num_attention_heads": 4, "num_key_value_heads": 1},
        "3:1",
    ),
    "qwen2": ("qwen2", WIDE | {"hidden_size": 96}, "1:1"),
    "qwen3-tied": ("qwen3", WIDE | {"tie_word_embeddings": True}, "1:1"),
    "gemma3": ("gemma3_text", WIDE | {"final_logit_softcapping": 3.0}, "1:1"),
    "gemma4": (
        "gemma4_text",
        WIDE
        | {
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 161,
        },
        "1:1",
    ),
    "phi3": ("phi3", {"hidden_size": 96, "intermediate_size": 160}, "1:1"),
    "falcon-new": (
        "falcon",
        CENTERED["falcon-new"][1] | {"hidden_size": 96, "ffn_hidden_size": 160},
        "1:1",
    ),
    "opt": ("opt", CENTERED["opt"][1] | {"hidden_size": 96, "ffn_dim": 160}, "1:1"),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS["qwen3_moe"][1] | WIDE | {"moe_intermediate_size": 96},
        "1:1",
    ),
    "gpt_oss": ("gpt_oss", EXPERTS["gpt_oss"][1] | {"intermediate_size": 96}, "1:1"),
    # An MLP beside the experts, and a norm of each.
    "gemma4 with experts": (
        "gemma4_text",
        EXPERTS["gemma4"][1] | WIDE | {"hidden_size": 64, "moe_intermediate_size": 96},
        "1:1",
    ),
    # Each expert is on one rank: columns of 24 and 40 do not divide into units of 32.
    "experts by number": ("qwen3_moe", EXPERTS["qwen3_moe"][1] | WIDE, "1:1"),
    "deepseek_v2": (
        "deepseek_v2",
        EXPERTS["deepseek_v2"][1]
        | {"num_attention_heads": 6, "intermediate_size": 160, "n_shared_experts": 4},
        "2:1",
    ),
    "deepseek_v3": (
        "deepseek_v3",
        EXPERTS["deepseek_v3"][1] | {"moe_intermediate_size": 96, "intermediate_size": 160},
        "1:1",
    ),
    "lfm2": ("lfm2", RECURRENT["lfm2-bias"][1] | WIDE | {"hidden_size": 96}, "1:1"),
    "lfm2_moe-2:1": (
        "lfm2_moe",
        RECURRENT["lfm2_moe"][1] | WIDE | {"hidden_size": 96, "num_key_value_heads": 3},
        "2:1",
    ),
    "qwen3_5-2:1": ("qwen3_5_text", THREE_KEY_HEADS | WIDE, "2:1"),
    "one delta key head": (
        "qwen3_5_text",
        THREE_KEY_HEADS
        | WIDE
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
        },
        "3:1",
    ),
    "qwen3_next": (
        "qwen3_next",
        RECURRENT["qwen3_next"][1]
        | {"hidden_size": 64, "head_dim": 16, "shared_expert_intermediate_size": 96},
        "1:1",
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        RECURRENT["qwen3_5_moe"][1]
        | {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 96}
        | {"shared_expert_intermediate_size": 64},
        "1:1",
    ),
    "nemotron_h": (
        "nemotron_h",
        RECURRENT["nemotron_h"][1] | WIDE | {"moe_shared_expert_intermediate_size": 64},
        "1:1",
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        RECURRENT["nemotron_h-latent"][1] | WIDE | {"moe_shared_expert_intermediate_size": 64},
        "1:1",
    ),
    "granite4-2:1": (
        "granitemoehybrid",
        RECURRENT["granite4"][1]
        | {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "mamba_expand": 2,
            "mamba_n_groups": 3,
            "shared_intermediate_size": 96,
        },
        "2:1",
    ),
    "bamba": ("bamba", RECURRENT["bamba"][1] | WIDE | {"hidden_size": 64}, "1:1"),
    # Each rank has a part of a group that Mamba-2 normalizes as one.
    "one group": (
        "granitemoehybrid",
        RECURRENT["granite4-dense"][1]
        | {"hidden_size": 64, "mamba_n_groups": 1, "shared_intermediate_size": 160},
        "1:1",
    ),
    "one group of nemotron_h": (
        "nemotron_h",
        RECURRENT["nemotron_h"][1]
        | WIDE
        | {"n_groups": 1, "moe_shared_expert_intermediate_size": 64},
        "1:1",
    ),
    "two groups of four ranks": (
        "granitemoehybrid",
        RECURRENT["granite4-dense"][1]
        | {"hidden_size": 64, "mamba_n_heads": 8, "mamba_expand": 4}
        | {"shared_intermediate_size": 160},
        "1:1:1:1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_smaller_and_add_up(
    name: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings, text = CASES[name]
    folder = save(make_model(model_type, **settings))
    size = max(2, len(text.split(":")))
    ranks = RankThreads(open_model(folder), Split.parse(size, text), max_rows=64)
    assert not [part for part in undivided(ranks.shards) if "mixers" in part]
    alone = native(folder)
    assert all(rank.weight_bytes < alone.weight_bytes for rank in ranks.decoders)
    states = alone.spec.state_bytes
    assert all(rank.spec.state_bytes < states or not states for rank in ranks.decoders)
    found = ranks.logits_of(token_ids)
    torch.testing.assert_close(found, logits_of(alone, token_ids), atol=1e-3, rtol=0)
    assert torch.equal(ranks.logits_of(token_ids, chunks=[7, 1, 9, 28]), found)


@pytest.mark.parametrize("format", [KVFormat.INT8, KVFormat.INT4_SEALED])
def test_a_quantized_cache_has_the_same_codes(
    format: KVFormat, make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    folder = save(make_model("llama", **WIDE | {"max_position_embeddings": 256}))
    ranks = RankThreads(open_model(folder), Split.parse(2, "1:1"), max_rows=128)
    tokens = torch.randint(3, 90, (100,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = logits_of(native(folder), tokens, format=format)
    found = ranks.logits_of(tokens, format=format)
    # The code of a value between two codes may be either of them.
    assert float((found - expected).abs().mean()) < 2e-3 * float(expected.std())


def test_a_step_without_memory_fails_in_all_ranks_and_the_next_runs(
    make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    folder = save(make_model("llama", **WIDE))
    ranks = RankThreads(open_model(folder), Split.parse(2, "1:1"), max_rows=64)
    kept = ranks.decoders[1]
    ranks.decoders[1] = ranks.with_engine(1, NativeEngine(LIBRARY, 1, max_workspace_bytes=1000))
    errors = ranks.run(lambda rank: _error(lambda: logits_of(rank, token_ids)))
    assert [type(error) for error in errors] == [MemoryError, MemoryError]
    ranks.decoders[1] = kept
    few = token_ids[:2]
    expected = logits_of(native(folder), few)
    torch.testing.assert_close(ranks.logits_of(few), expected, atol=1e-3, rtol=0)


def _error(function: Callable[[], object]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None
