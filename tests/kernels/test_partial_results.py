"""What decode takes for partial results is at most what the memory plan counts for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.engine.memory_requests import memory_request
from support.kernels.kernel_gpu import gpu
from torch.utils._python_dispatch import TorchDispatchMode

from appliance.engine.memory.plan import MemoryRequest, workspace_bytes
from appliance.kernels.attention import launch as attention_launch
from appliance.kernels.attention import work as attention_work
from appliance.kernels.attention.launch import paged_attention, plan_attention
from appliance.kernels.attention.work import MOST_PARTIALS, most_partials, most_spans
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.latent_attention import launch as latent_launch
from appliance.kernels.latent_attention.launch import latent_attention
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.spec import AttentionSpec, LatentAttentionSpec, NormSpec, RopeSpec

CPU, PAGE = torch.device("cpu"), 32
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LATENT, ROTARY = 128, 64
ROWS, CONTEXTS = (1, 2, 17, 18, 40, 64, 511, 512), (1, 32, 100, 8192, 131_072, 1 << 20)


class Floats(TorchDispatchMode):
    """Counts the bytes of float32 that are taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if "empty" in function.overloadpacket.__name__ and result.dtype is torch.float32:
            self.num_bytes += result.nbytes
        return result


@contextmanager
def without_launches() -> Iterator[Floats]:
    with pytest.MonkeyPatch.context() as patch, gpu(86), Floats() as floats:
        for module in (attention_launch, latent_launch):
            for name in vars(module):
                if name.startswith("_launch_"):
                    patch.setattr(module, name, lambda *_: None)
        yield floats


def decoding(num_seqs: int, num_rows: int, context: int, decode_rows: int = 1) -> RaggedBatch:
    """A step as a graph captures it: rows of sequences over tables for whole contexts."""
    return RaggedBatch(
        query_start=torch.zeros(num_seqs + 1, dtype=torch.int32),
        context_lens=torch.zeros(num_seqs, dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32).expand(num_seqs, -(-context // PAGE)),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
        num_decodes=num_seqs,
        host_query_lens=(decode_rows,) * num_seqs,
        host_context_lens=(context,) * num_seqs,
        decode_rows=decode_rows,
    )


def taken_by_heads(batch: RaggedBatch, window: int | None = None) -> int:
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "device": CPU}
    cache = KVPages.allocate(KVFormat.BF16, num_blocks=1, block_size=PAGE, **sizes)
    query = torch.empty(len(batch.slot_mapping), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    with without_launches() as floats:
        paged_attention(query, cache, plan_attention(batch, PAGE), scale=0.1, window=window)
    return floats.num_bytes


def taken_by_latents(batch: RaggedBatch) -> int:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_dim": (LATENT + ROTARY) // 2, "device": CPU}
    cache = KVPages.allocate(KVFormat.BF16, num_blocks=1, block_size=PAGE, **sizes)
    num_rows = len(batch.slot_mapping)
    query = torch.empty(num_rows, HEADS, 32 + ROTARY, dtype=torch.bfloat16)
    angles = torch.zeros(num_rows, ROTARY // 2)
    keys = values = torch.empty(HEADS, 32, LATENT, dtype=torch.bfloat16)
    work = plan_attention(batch, PAGE)
    fixed: dict[str, Any] = {"keys": keys, "values": values, "scale": 0.1}
    with without_launches() as floats:
        latent_attention(query, angles, angles, replace(cache, in_rows=True), work, **fixed)
    return floats.num_bytes


def planned(num_seqs: int, context: int, mixer: object, **changes: object) -> int:
    base = memory_request().spec
    layer = replace(base.layers[0], mixer=mixer)  # type: ignore[arg-type]
    spec = replace(base, layers=(layer,), context_length=context)
    request: MemoryRequest = memory_request(spec=spec, max_num_seqs=num_seqs, **changes)
    on_gpu = replace(request, host_budget_bytes=0)
    return workspace_bytes(on_gpu) - workspace_bytes(request)


def heads(window: int | None = None) -> AttentionSpec:
    mixer = memory_request().spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "window": window}
    return replace(mixer, **sizes)  # type: ignore[arg-type]


def latents() -> LatentAttentionSpec:
    fixed = 0.1, RopeSpec(1e4, ROTARY), NormSpec(1e-6)
    return LatentAttentionSpec(HEADS, None, LATENT, 32, ROTARY, 32, *fixed)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_seqs", ROWS)
def test_answers_take_at_most_what_is_planned(num_seqs: int, context: int) -> None:
    batch = decoding(num_seqs, num_seqs, context)
    for window in (None, 1, 4096):
        assert taken_by_heads(batch, window) <= planned(num_seqs, context, heads(window))
    assert taken_by_latents(batch) <= planned(num_seqs, context, latents())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_seqs", [1, 16, 40])
def test_drafts_take_at_most_what_is_planned(num_seqs: int, context: int) -> None:
    batch = decoding(num_seqs, min(8 * num_seqs, 40), context, decode_rows=8)
    for window in (None, 512):
        assert taken_by_heads(batch, window) <= planned(num_seqs, context, heads(window))
    assert taken_by_latents(batch) <= planned(num_seqs, context, latents())


@pytest.mark.parametrize("context", CONTEXTS)
def test_rows_cut_at_blocks_take_at_most_what_is_planned(context: int) -> None:
    """Two rows of each of 48 answers, in two blocks each."""
    taken = taken_by_heads(decoding(96, 96, context))
    assert taken <= planned(48, context, heads(), open_bytes=1)


def test_what_is_planned_does_not_grow_without_end() -> None:
    """4,096 partial results of 8 heads of 64 floats, with a float for the sum of weights."""
    limit = 4096 * HEADS * (HEAD_DIM + 1) * 4
    for num_seqs in (40, 512):
        assert planned(num_seqs, 131_072, heads()) == limit
        assert planned(num_seqs, 1 << 20, heads()) == limit
        assert taken_by_heads(decoding(num_seqs, num_seqs, 1 << 20)) == limit


def test_a_launch_that_takes_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = planned(64, 131_072, heads())
    monkeypatch.setattr(attention_work, "MOST_PARTIALS", 2 * MOST_PARTIALS)
    assert taken_by_heads(decoding(64, 64, 131_072)) > counted


def test_more_rows_or_tokens_have_no_fewer_partial_results() -> None:
    found = [
        [most_partials(rows, tokens) for tokens in range(1, 1 << 20, 9973)]
        for rows in (*range(1, 513), 4096, 5000)
    ]
    for fewer, more in pairwise(found):
        assert fewer == sorted(fewer)
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


@pytest.mark.parametrize("rows", [1, 8, 16, 17])
def test_few_rows_over_a_long_context_keep_short_spans(rows: int) -> None:
    assert most_partials(rows, 131_072) == rows * most_spans(131_072)
