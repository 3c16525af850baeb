"""The packaged model in float32: its parts choose the greedy tokens that the whole one chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from native_models import LIBRARY
from rank_threads import RankThreads
from teacher_forcing import BLOCK_SIZE

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.kv_format import KVFormat
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.weight import dense
from appliance.model.native_loader import load_native
from appliance.model.shard.split import Split
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource

pytestmark = pytest.mark.model

PROMPTS = [[first, 314, 253] for first in range(1000, 17_000, 1000)]  # any tokens will do
NUM_TOKENS = 32  # of each answer; 512 of all
CLOSE = 1e-3  # between the two best logits


class DenseWeights:
    """A model's weights, none of them packed, so that no activation is rounded to 8 bits."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def packed_bits(self, name: str) -> None:
        return None

    float_bits = packed_bits

    def load(self, name: str) -> Weight:
        return dense(self._weights.load(name), "float32")


class Sequences:
    """All prompts in one decoder's cache."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder
        self._lengths = [0] * len(PROMPTS)
        self._width = -(-(len(PROMPTS[0]) + NUM_TOKENS) // BLOCK_SIZE)
        self._cache = decoder.allocate_cache(
            KVFormat.FP32, num_blocks=len(PROMPTS) * self._width, block_size=BLOCK_SIZE
        )

    def add(self, rows: Sequence[Sequence[int]], num_logits: int) -> Tensor:
        """Add tokens to each sequence; return the logits after the last ones of each.

        Returns:
            (sequences, num_logits, vocabulary), of rank 0.
        """
        counts, device = [len(one) for one in rows], self._decoder.device
        begins, self._lengths = (
            self._lengths,
            [length + count for length, count in zip(self._lengths, counts, strict=True)],
        )
        tables = [
            tuple(range(place * self._width, (place + 1) * self._width))
            for place in range(len(rows))
        ]
        batch = RaggedBatch.of(counts, self._lengths, tables, block_size=BLOCK_SIZE, device=device)
        ends = torch.tensor(counts).cumsum(0)
        wanted = ends[:, None] - torch.arange(num_logits, 0, -1)
        positions = [torch.arange(*span) for span in zip(begins, self._lengths, strict=True)]
        logits = self._decoder.forward(
            torch.tensor([token for one in rows for token in one]),
            torch.cat(positions),
            batch,
            self._cache,
            wanted.reshape(-1),
        )
        return logits.view(len(rows), num_logits, -1)


@cache
def answers_of_one(path: Path) -> tuple[Tensor, Tensor]:
    """Return greedy tokens (sequences, NUM_TOKENS), and how far the second best is behind each."""
    decoder = load_native(source_of(path), NativeEngine(LIBRARY, 1), torch.float32)
    sequences, rows, tokens, gaps = Sequences(decoder), PROMPTS, [], []
    for _ in range(NUM_TOKENS):
        best = sequences.add(rows, 1)[:, 0].topk(2)
        tokens.append(best.indices[:, 0])
        gaps.append(best.values[:, 0] - best.values[:, 1])
        rows = tokens[-1][:, None].tolist()
    return torch.stack(tokens, dim=1), torch.stack(gaps, dim=1)


def source_of(path: Path) -> ModelSource:
    source = open_model(path)
    return replace(source, weights=DenseWeights(source.weights))


@pytest.mark.parametrize("split", [Split((1, 1)), Split((2, 1), is_exact=True)], ids=str)
def test_greedy_tokens_are_those_of_one_process(smollm2_gguf: Path, split: Split) -> None:
    """Nine heads in three groups: 6 and 3 of them, beside even or uneven columns and tokens."""
    tokens, gaps = answers_of_one(smollm2_gguf)
    given = [
        [*prompt, *answer[:-1]] for prompt, answer in zip(PROMPTS, tokens.tolist(), strict=True)
    ]
    ranks = RankThreads(source_of(smollm2_gguf), split, sum(map(len, given)))
    logits = ranks.run(lambda rank: Sequences(rank).add(given, NUM_TOKENS))[0]
    differs = logits.argmax(dim=-1) != tokens
    assert tokens.numel() == 512
    assert not (differs & (gaps > CLOSE)).any()
    assert differs.sum() <= (gaps <= CLOSE).sum()
