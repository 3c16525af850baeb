from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from appliance.kernels.attention import reference as reference_attention
from appliance.kernels.attention.launch import paged_attention, plan_attention
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.kv_seal import reference
from appliance.kernels.kv_seal.launch import seal
from appliance.kernels.kv_write.reference import write_kv
from appliance.kernels.rows.ragged import RaggedBatch, SealedSpans

CPU = torch.device("cpu")


def filled(head_dim: int, num_kv_heads: int = 2, num_open: int = 40) -> SealedBlocks:
    cache = SealedBlocks.allocate(
        num_blocks=40, num_open=num_open, num_kv_heads=num_kv_heads, head_dim=head_dim, device=CPU
    )
    random = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, num_open * 32, num_kv_heads, head_dim, generator=random)
    key[..., 3] += 20  # a channel that lies off: what sealing is for
    write_kv(key, value, cache.open, torch.arange(num_open * 32))
    return cache


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 512])
def test_a_sealed_page_is_the_references(head_dim: int) -> None:
    found, expected = filled(head_dim, num_open=3), filled(head_dim, num_open=3)
    seal(found, torch.tensor([[2, 7], [-1, 9], [0, 30]]))
    reference.seal(expected, [2, 0], [7, 30])
    assert torch.equal(found.closed.pages, expected.closed.pages)
    assert found.closed.pages[[7, 30]].any(-1).all()
    assert not found.closed.pages[9].any()


def test_a_channel_that_lies_off_costs_the_others_nothing() -> None:
    cache = filled(64, num_open=1)
    reference.seal(cache, [0], [5])
    opened, closed = (
        pages.gather([block], 32, torch.float64)
        for pages, block in ((cache.open, 0), (cache.closed, 5))
    )
    for before, after in zip(opened, closed, strict=True):
        spread = (before - before.mean(0)).abs().max()
        assert (after - before).abs().max() < 0.6 * spread / 7.5


# Every two of heads, window and dtype meet.
@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        ((8, 2, 64), None, torch.bfloat16),
        ((8, 2, 64), 50, torch.float32),
        ((2, 2, 80), None, torch.float32),
        ((2, 2, 80), 50, torch.bfloat16),
        ((3, 1, 128), None, torch.bfloat16),
        ((3, 1, 128), 50, torch.float32),
        ((8, 1, 512), None, torch.bfloat16),
    ],
)
def test_attention_over_closed_and_open_blocks(
    dtype: torch.dtype, window: int | None, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    cache = filled(head_dim, num_kv_heads)
    # Nothing closed, a block just begun, a block just full, several spans; chunks.
    query_lens, context_lens = (1, 1, 1, 1, 40, 5), (7, 33, 64, 300, 100, 5)
    sealed_lens = (0, 32, 32, 288, 32, 0)
    free = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist())
    opened = iter(range(40))
    tables, open_tables = [], []
    for context, sealed in zip(context_lens, sealed_lens, strict=True):
        table = list(itertools.islice(free, sealed // 32))
        slots = list(itertools.islice(opened, -(-context // 32)))
        reference.seal(cache, slots[: len(table)], table)
        tables.append(table)
        open_tables.append(tuple(slots[len(table) :]))
    # What lies in open blocks that are closed by now, or beyond a context, is poison.
    used = torch.zeros(40, 32, dtype=torch.bool)
    for context, sealed, pages in zip(context_lens, sealed_lens, open_tables, strict=True):
        for place in range(context - sealed):
            used[pages[place // 32], place % 32] = True
    records = cache.open.halves.unflatten(-1, (-1, 2))[:, :, -32:]  # (pages, heads, tokens, 2)
    records.masked_fill_(~used[:, None, :, None], torch.nan)

    def int32(rows: list[tuple[int, ...]]) -> torch.Tensor:
        width = max(1, *map(len, rows))
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)

    batch = RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.cat((int32([tuple(t) for t in tables]), torch.zeros(6, 1).int()), 1),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        num_decodes=4,
        host_query_lens=query_lens,
        host_context_lens=context_lens,
        sealed=SealedSpans(
            torch.tensor(sealed_lens, dtype=torch.int32),
            int32(open_tables),
            sealed_lens,
            tuple(open_tables),
        ),
    )
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    work = plan_attention(batch, 32)
    found = paged_attention(query, cache, work, scale=scale, window=window)
    expected = reference_attention.paged_attention(
        query.double(), cache, batch, scale=scale, window=window
    )
    # A key is rounded to float16 when its scale and offset are put on it.
    bound = 8e-3 if dtype is torch.bfloat16 else 3e-3
    assert (found.double() - expected).abs().max() / expected.abs().max() < bound


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_picture_see_all_of_it_in_open_blocks(
    dtype: torch.dtype, window: int | None
) -> None:
    """One whose first row is alone in its block, and one that ends with a block."""
    cache = filled(64)
    starts, contexts, pictures = (
        (63, 63, 30),
        (64, 100, 128),
        (range(0), range(63, 97), range(32, 128)),
    )
    free = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist())
    opened = iter(range(40))
    tables, written, seen = [], [], list[int]()
    used = torch.zeros(40, 32, dtype=torch.bool)
    for start, context, picture in zip(starts, contexts, pictures, strict=True):
        table, slots = (list(itertools.islice(each, -(-context // 32))) for each in (free, opened))
        reference.seal(cache, slots[: context // 32], table[: context // 32])
        tables.append(table)
        written.append(slots[start // 32 :])
        seen += [picture.stop if at in picture else at + 1 for at in range(start, context)]
        for at in range(start // 32 * 32, context):
            used[slots[at // 32], at % 32] = True
    records = cache.open.halves.unflatten(-1, (-1, 2))[:, :, -32:]  # (pages, heads, tokens, 2)
    records.masked_fill_(~used[:, None, :, None], torch.nan)
    rows = [context - start for start, context in zip(starts, contexts, strict=True)]
    batch = RaggedBatch.of(
        rows, contexts, tables, block_size=32, device=CPU, open_blocks=written, sees=seen
    )
    assert batch.host_query_lens[:2] == (1, 1)
    assert batch.num_decodes == 1
    query = torch.randn(sum(rows), 8, 64).to(dtype)
    options: dict[str, Any] = {"scale": 0.125, "window": window}
    found = paged_attention(query, cache, plan_attention(batch, 32), **options, sees=batch.sees)
    expected, causal = (
        reference_attention.paged_attention(query.double(), cache, batch, **options, sees=sees)
        for sees in (batch.sees, None)
    )
    bound = 8e-3 if dtype is torch.bfloat16 else 3e-3
    assert (found.double() - expected).abs().max() / expected.abs().max() < bound
    assert (causal - expected).abs().max() / expected.abs().max() > 0.1
