"""The packaged model in float32: its parts choose the greedy tokens that the whole one chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import BLOCK_SIZE
from support.ranks.rank_threads import RankThreads

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.weights.weight import dense
from appliance.model.native_loader import load_native
from appliance.model.shard.split import Split
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource

pytestmark = pytest.mark.model

NUM_TEXTS, NUM_TOKENS = 16, 16  # more than one tile of rows
TEXTS = [[1000 * text + 61 * place for place in range(NUM_TOKENS)] for text in range(1, 17)]
CLOSE = 1e-3  # between the logits of the two best tokens


class DenseWeights:
    """A model's weights, none of them packed, so that no activation is rounded to 8 bits."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self.load = cache(self._load)  # every rank reads them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def packed_bits(self, name: str) -> None:
        return None

    float_bits = group_size = packed_bits

    def _load(self, name: str) -> Weight:
        return dense(self._weights.load(name), "float32")


def logits_of_all(decoder: NativeDecoder) -> Tensor:
    """Return the logits after each token of all texts, (NUM_TEXTS * NUM_TOKENS, vocabulary)."""
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=NUM_TEXTS, block_size=BLOCK_SIZE)
    lengths, tables = [NUM_TOKENS] * NUM_TEXTS, [(block,) for block in range(NUM_TEXTS)]
    batch = RaggedBatch.of(lengths, lengths, tables, block_size=BLOCK_SIZE, device=decoder.device)
    positions = torch.arange(NUM_TOKENS).repeat(NUM_TEXTS)
    return decoder.forward(torch.tensor(TEXTS).reshape(-1), positions, batch, cache)


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> ModelSource:
    source = open_model(smollm2_gguf)
    return replace(source, weights=DenseWeights(source.weights))


@pytest.fixture(scope="module")
def best_of_one(source: ModelSource) -> tuple[Tensor, Tensor]:
    """The greedy token at each place, and the margin to the second best."""
    decoder = load_native(source, NativeEngine(LIBRARY, 1), torch.float32)
    best = logits_of_all(decoder).topk(2)
    return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]


@pytest.mark.parametrize("split", [Split((1, 1)), Split((2, 1), is_exact=True)], ids=str)
def test_greedy_tokens_are_those_of_one_process(
    source: ModelSource, best_of_one: tuple[Tensor, Tensor], split: Split
) -> None:
    """Nine heads in three groups: 6 and 3 of them, beside even or uneven columns and tokens."""
    tokens, gaps = best_of_one
    ranks = RankThreads(source, split, NUM_TEXTS * NUM_TOKENS)
    differs = ranks.run(logits_of_all)[0].argmax(dim=-1) != tokens
    assert tokens.numel() == 256
    assert not (differs & (gaps > CLOSE)).any()
    assert differs.sum() <= (gaps <= CLOSE).sum()
