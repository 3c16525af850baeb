"""The counts of the experts' benchmark, which are the same on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.source import open_model
from bench.cpu.experts import bytes_of_a_token
from bench.lib.model_shapes import TINY_QWEN_30B_A3B, TINY_QWEN_36_35B_A3B
from bench.lib.synthetic_gguf import write_model

if TYPE_CHECKING:
    from pathlib import Path


def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    for shape in (TINY_QWEN_30B_A3B, TINY_QWEN_36_35B_A3B):
        write_model(tmp_path / "model.gguf", shape)
        counted = bytes_of_a_token(open_model(tmp_path / "model.gguf"))
        matrices = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 4  # layers
        of_an_expert = matrices * (4 / 8 + 2 / 32)
        embedding = (shape["vocab_size"] - 1) * shape["hidden_size"] * (1 + 2 / 32)
        left_out = counted["weight_bytes_of_all"] - counted["weight_bytes_of_a_token"]
        assert abs(left_out - 6 * of_an_expert - embedding) <= 2
