"""The parts of a model that torch executes, run concurrently, give the whole model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of
from support.ranks.torch_ranks import CPU, TorchRankThreads

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.shard.split import Split
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDE = {"intermediate_size": 160, "head_dim": 16, "vocab_size": 161}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-2:1": (
        "llama",
        WIDE | {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True},
        "2:1",
    ),
    "one key head": ("llama", WIDE | {"num_attention_heads": 4, "num_key_value_heads": 1}, "3:1"),
    # Windows, soft caps, norms after each part, one matrix as embedding and head.
    "gemma3": ("gemma3_text", WIDE | {"final_logit_softcapping": 3.0}, "1:1"),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS["qwen3_moe"][1] | WIDE | {"moe_intermediate_size": 96},
        "1:1",
    ),
    "experts by number": ("qwen3_moe", EXPERTS["qwen3_moe"][1] | WIDE, "1:1"),
    "deepseek_v2-2:1": (
        "deepseek_v2",
        EXPERTS["deepseek_v2-groups"][1]
        | {"num_attention_heads": 6, "intermediate_size": 160, "n_shared_experts": 4},
        "2:1",
    ),
    "lfm2": ("lfm2", RECURRENT["lfm2-bias"][1] | WIDE | {"hidden_size": 96}, "1:1"),
    "qwen3_5-2:1": (
        "qwen3_5_text",
        RECURRENT["qwen3_5"][1]
        | WIDE
        | {"hidden_size": 64, "num_key_value_heads": 3, "linear_num_key_heads": 3},
        "2:1",
    ),
    "gemma4 with experts": (
        "gemma4_text",
        EXPERTS["gemma4"][1] | WIDE | {"hidden_size": 64},
        "1:1",
    ),
    "one group": (
        "granitemoehybrid",
        RECURRENT["granite4-dense"][1]
        | {"hidden_size": 64, "mamba_n_groups": 1, "shared_intermediate_size": 160},
        "1:1",
    ),
    "bamba": ("bamba", RECURRENT["bamba"][1] | WIDE | {"hidden_size": 64}, "1:1"),
    # A mixer and the MLP beside it are summed together.
    "falcon-new": (
        "falcon",
        CENTERED["falcon-new"][1] | {"hidden_size": 96, "ffn_hidden_size": 160},
        "1:1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_add_up(
    name: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings, text = CASES[name]
    source = open_model(save(make_model(model_type, **settings)))
    alone = load_decoder(source, REFERENCE, CPU, torch.float32)
    ranks = TorchRankThreads(source, Split.parse(2, text))
    assert all(rank.weight_bytes < alone.weight_bytes for rank in ranks.decoders)
    expected = logits_of(alone, token_ids)
    torch.testing.assert_close(ranks.logits_of(token_ids), expected, atol=1e-3, rtol=0)
    expected = logits_of(alone, token_ids, format=KVFormat.INT8)
    found = ranks.logits_of(token_ids, format=KVFormat.INT8, chunks=[7, 1, 9, 28])
    # The code of a value between two codes may be either of them.
    assert float((found - expected).abs().mean()) < 2e-3 * float(expected.std())
