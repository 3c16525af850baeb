"""Stages that run in turn give the logits of the whole model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.native_models import LIBRARY, native
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of
from support.ranks.stage_threads import StageThread, StageThreads

from appliance.engine.ranks.shared_step import RankStep
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

WIDE = {"intermediate_size": 160, "head_dim": 16, "vocab_size": 161}
# Each case has a feature, between two layers or in one, that no other has.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama-tied": ("llama", WIDE | {"tie_word_embeddings": True}, (0, 1, 3)),
    "llama-three": ("llama", WIDE | {"num_hidden_layers": 4}, (0, 1, 3, 4)),
    "gemma3: norms after": ("gemma3_text", WIDE | {"final_logit_softcapping": 3.0}, (0, 1, 3)),
    "falcon: parallel": (
        "falcon",
        CENTERED["falcon-new"][1] | {"hidden_size": 96, "ffn_hidden_size": 160},
        (0, 1, 3),
    ),
    "opt: positions": ("opt", CENTERED["opt"][1] | {"hidden_size": 96, "ffn_dim": 160}, (0, 1, 3)),
    "qwen3_moe": ("qwen3_moe", EXPERTS["qwen3_moe"][1] | WIDE, (0, 1, 3)),
    "gpt_oss: sinks": ("gpt_oss", EXPERTS["gpt_oss"][1], (0, 1, 3)),
    "deepseek_v3: latents": ("deepseek_v3", EXPERTS["deepseek_v3"][1], (0, 1, 3)),
    "lfm2: states": ("lfm2", RECURRENT["lfm2"][1] | WIDE, (0, 2, 3)),
    "qwen3_next: states": ("qwen3_next", RECURRENT["qwen3_next"][1], (0, 1, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_say_what_the_whole_model_says(
    name: str, make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model_type, settings, bounds = CASES[name]
    folder = save(make_model(model_type, **settings))
    whole = native(folder)
    stages = StageThreads(open_model(folder), bounds, max_rows=64)
    expected = logits_of(whole, token_ids)
    assert torch.equal(stages.logits_of(token_ids), expected)
    assert torch.equal(stages.logits_of(token_ids, chunks=[7, 1, 9, 28]), expected)
    held = [stage.decoder.weight_bytes for stage in stages.stages]
    assert all(num_bytes < whole.weight_bytes for num_bytes in held)


@pytest.mark.parametrize("format", [KVFormat.INT8, KVFormat.INT4_SEALED])
def test_a_quantized_cache_has_the_same_codes(
    format: KVFormat, make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    """This includes micro-batches that end inside a block that another one seals."""
    folder = save(make_model("llama", **WIDE | {"max_position_embeddings": 256}))
    stages = StageThreads(open_model(folder), (0, 1, 3), max_rows=128)
    tokens = torch.randint(3, 90, (100,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = logits_of(native(folder), tokens, format=format)
    assert torch.equal(stages.logits_of(tokens, format=format), expected)


@pytest.fixture
def two(make_model: Callable[..., Any], save: Callable[[Any], Path]) -> StageThreads:
    return StageThreads(open_model(save(make_model("llama", **WIDE))), (0, 1, 3), max_rows=64)


def decode(stage: StageThread, tokens: list[int]) -> Tensor:
    """Run a step with the first token of each sequence."""
    count = len(tokens)
    cache = stage.allocate_cache(KVFormat.FP32, num_blocks=count, block_size=16)
    blocks = [[number] for number in range(count)]
    batch = RaggedBatch.of(
        [1] * count, [1] * count, blocks, block_size=16, device=torch.device("cpu")
    )
    positions = torch.zeros(count, dtype=torch.int64)
    return stage.run(RankStep(torch.tensor(tokens), positions, batch, None, True), cache)


def test_with_many_streams_both_stages_work_in_the_turn_between(two: StageThreads) -> None:
    """The first exchange is that of the workspace."""
    tokens = list(range(5, 21))
    answers, _ = two.run(lambda stage: decode(stage, tokens))
    first, last = two.stages
    assert first.runs == [(1, 8), (2, 8)]
    assert last.runs == [(2, 8), (3, 8)]
    assert len(first.group.exchanges) == len(last.group.exchanges) == 4
    alone, _ = two.run(lambda stage: decode(stage, tokens[-1:]))
    assert torch.equal(answers[-1:], alone), "no row depends on the rows beside it"


def test_a_stage_without_memory_fails_all_before_any_begins(
    two: StageThreads, token_ids: list[int]
) -> None:
    expected = two.logits_of(token_ids)
    last = two.stages[1]
    kept, before = last.decoder, [len(stage.runs) for stage in two.stages]
    small = NativeEngine(LIBRARY, 1, max_workspace_bytes=1000)
    last.decoder = replace(kept, engine=small)
    errors = two.run(lambda stage: _error(lambda: stage.logits_of(token_ids)))
    assert [type(error) for error in errors] == [MemoryError, MemoryError]
    assert [len(stage.runs) for stage in two.stages] == before
    last.decoder = kept
    assert torch.equal(two.logits_of(token_ids), expected)


def _error(function: Callable[[], object]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None
