"""An adapter whose factors are divided among ranks gives the same logits as in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.lora import write_adapter
from support.models.native_models import native
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of
from support.ranks.rank_threads import RankThreads
from support.ranks.torch_ranks import CPU, TorchRankThreads

from appliance.kernels.backend import REFERENCE
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.loader import load_decoder
from appliance.model.shard.split import Split
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDE = {"intermediate_size": 160, "head_dim": 16, "vocab_size": 161}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-2:1": ("llama", WIDE | {"num_key_value_heads": 3}, "2:1"),
    # Its checkpoint stores queries, keys, values and gates of a key head side by side.
    "qwen3_next": (
        "qwen3_next",
        RECURRENT["qwen3_next"][1]
        | {"hidden_size": 64, "head_dim": 16, "shared_expert_intermediate_size": 96},
        "1:1",
    ),
    "qwen3_5": ("qwen3_5_text", RECURRENT["qwen3_5"][1] | WIDE | {"hidden_size": 64}, "1:1"),
    "falcon-new": (
        "falcon",
        CENTERED["falcon-new"][1] | {"hidden_size": 96, "ffn_hidden_size": 160},
        "1:1",
    ),
    "lfm2": ("lfm2", RECURRENT["lfm2-bias"][1] | WIDE | {"hidden_size": 96}, "1:1"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_an_adapter_add_up(
    name: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    model_type, settings, text = CASES[name]
    source = open_model(save(make_model(model_type, **settings)))
    targets = adapter_targets(source.spec, source.family.names)
    shapes = {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}
    adapter = read_adapter(write_adapter(tmp_path / "adapter", shapes, rank=5), source, 8)

    def adapted(executor: Any) -> torch.Tensor:
        slots = executor.adapter_slots(targets, 1, 8)
        slots.put(0, slots.lay_out(adapter))
        return logits_of(executor, token_ids, adapters=slots)

    alone = native(source.path)
    expected = adapted(alone)
    assert float((expected - logits_of(alone, token_ids)).abs().max()) > 0.1
    split = Split.parse(2, text)
    found = RankThreads(source, split, max_rows=64).run(adapted)[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    expected = adapted(load_decoder(source, REFERENCE, CPU, torch.float32))
    found = TorchRankThreads(source, split).run(adapted)[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
