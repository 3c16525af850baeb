"""What benchmarks of hybrids and experts count, which is the same on any machine."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.model.source import open_model
from bench.cpu.experts import bytes_of_a_token
from bench.engine.turns import converse
from bench.lib.model_shapes import TINY_QWEN_30B_A3B, TINY_QWEN_36_35B_A3B
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint
from bench.lib.synthetic_gguf import write_model

if TYPE_CHECKING:
    from pathlib import Path


def test_turn_20_of_a_hybrid_recomputes_what_is_new(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", TINY_QWEN_36_35B_A3B, Schemes())
    config = EngineConfig(
        model=str(tmp_path / "model"), threads=1, max_num_seqs=1, max_model_len=1200
    )
    engine = LLMEngine.load(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )
    options = Namespace(turns=20, new_tokens=48, answer_tokens=5, seed=0)
    turns = converse(engine, options, vocabulary=512)
    size = engine.info.block_size
    engine.close()
    assert turns[-1].prompt_tokens == 20 * 48 + 19 * 5
    # The last token of an answer is never computed, and checkpoints lie at ends of blocks.
    assert all(turn.recomputed <= 48 + 1 + 2 * size for turn in turns[1:]), turns


def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    for shape in (TINY_QWEN_30B_A3B, TINY_QWEN_36_35B_A3B):
        write_model(tmp_path / "model.gguf", shape)
        counted = bytes_of_a_token(open_model(tmp_path / "model.gguf"))
        matrices = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 4  # layers
        of_an_expert = matrices * (4 / 8 + 2 / 32)
        embedding = (shape["vocab_size"] - 1) * shape["hidden_size"] * (1 + 2 / 32)
        left_out = counted["weight_bytes_of_all"] - counted["weight_bytes_of_a_token"]
        assert abs(left_out - 6 * of_an_expert - embedding) <= 2
