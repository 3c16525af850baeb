"""Contexts cut into spans, whose rows and partial results come together again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_spans import span_table

from appliance.kernels.attention.launch import (
    decode_spans,
    paged_attention,
    plan_attention,
)
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch
from tests.kernels.executed.attending import assert_matches_reference, attend

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import MakeCase


FEW_ROWS, FEW_CONTEXTS = (4, 1, 7, 3, 16), (150, 33, 290, 3, 90)


@pytest.mark.parametrize(
    ("kv_format", "num_heads", "window", "softcap"),
    [
        (KVFormat.FP16, 3, None, None),
        (KVFormat.INT8, 3, None, None),
        (KVFormat.INT4, 4, None, None),
        (KVFormat.FP8, 4, 50, None),
        (KVFormat.FP16, 1, 1, None),
        (KVFormat.INT4, 9, 200, 5.0),
    ],
)
def test_some_rows_of_a_sequence_decode_together(
    make_case: MakeCase,
    kv_format: KVFormat,
    num_heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """In one tile of 16 rows, or in several: 9 heads leave room for one token."""
    case = make_case(
        FEW_ROWS, FEW_CONTEXTS, num_heads=num_heads, kv_format=kv_format, decode_rows=16
    )
    assert case.batch.num_decodes == len(FEW_ROWS)
    assert_matches_reference(case, window, softcap, sinks=torch.linspace(-1, 1, num_heads))


@pytest.mark.parametrize(
    ("kv_format", "num_heads", "context", "window"),
    [
        (KVFormat.FP16, 4, 1027, None),  # across the end of a span
        (KVFormat.INT4, 4, 131, None),
        (KVFormat.INT8, 3, 130, None),
        (KVFormat.FP8, 3, 130, 50),
        (KVFormat.INT4, 9, 386, 40),
    ],
)
def test_tokens_that_are_verified_together_get_the_bits_of_one_at_a_time(
    make_case: MakeCase, kv_format: KVFormat, num_heads: int, context: int, window: int | None
) -> None:
    """The rows of a draft may cross the ends of blocks and spans, and have company."""
    sinks = torch.linspace(-1, 1, num_heads)
    rows, others = 5, (4, 30)
    case = make_case(
        (rows, *others[:1]), (context, *others[1:]),
        num_heads=num_heads, kv_format=kv_format, decode_rows=rows,
    )  # fmt: skip
    case.query[1] *= 1e4  # what one row needs to become float16 is no business of the next
    together = attend(case, window, sinks=sinks)
    for row in range(rows):
        position = context - rows + row
        batch = replace(
            case.batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([position + 1], dtype=torch.int32),
            num_decodes=1,
            decode_rows=1,
            host_query_lens=(1,),
            host_context_lens=(position + 1,),
        )
        alone = replace(case, query=case.query[row : row + 1], batch=batch)
        assert torch.equal(attend(alone, window, sinks=sinks), together[row : row + 1]), row


def test_lengths_that_change_on_the_device_alone_are_obeyed(make_case: MakeCase) -> None:
    """As a captured graph is replayed: the host still has the lengths of the capture."""
    lengths = (2, 4, 1), (300, 40, 1)
    expected = attend(make_case(*lengths, num_heads=4, decode_rows=4))
    case = make_case((4, 4, 4), (300, 40, 4), num_heads=4, decode_rows=4)
    wanted = make_case(*lengths, num_heads=4, decode_rows=4)
    batch = replace(
        case.batch,
        query_start=wanted.batch.query_start,
        context_lens=wanted.batch.context_lens,
        block_tables=wanted.batch.block_tables,
    )
    query = torch.cat((wanted.query, torch.full_like(case.query[:5], torch.nan)))
    found = attend(replace(case, query=query, cache=wanted.cache, batch=batch))
    assert torch.equal(found[:7], expected)


def test_partial_results_of_many_spans_are_merged_in_groups(make_case: MakeCase) -> None:
    """A context of three groups, and one of so many that these are merged in two turns.

    Partial results are float32 whatever the format of the cache.
    """
    contexts = (9000, 3400, 3100)
    case = make_case((1, 2, 1), contexts, num_heads=2, kv_format=KVFormat.FP16, decode_rows=2)
    assert_matches_reference(case)
    assert_matches_reference(case, window=3000)


def test_a_window_leaves_few_spans(make_case: MakeCase) -> None:
    case = make_case((1, 1), (5000, 100))
    work = plan_attention(case.batch, case.cache.block_size)
    paged_attention(case.query, case.cache, work, scale=0.1, window=128)
    spans = work.spans[128, 1]
    assert spans.count.item() <= 3
    assert len(spans.table) <= 2 * 2
    assert spans.table[0, :3].tolist() == [0, 4864, 5000]


@settings(max_examples=8, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 16)), min_size=1, max_size=9),
    st.sampled_from([None, 1, 128, 4096]),
)
def test_the_device_cuts_contexts_as_the_model_does(
    sequences: list[tuple[int, int]], window: int | None
) -> None:
    rows = [min(count, max(context, 1)) for context, count in sequences]
    contexts = [context for context, _ in sequences]
    batch = RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.zeros(len(contexts), -(-max(*contexts, 1) // 32), dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        num_decodes=len(contexts),
        host_query_lens=(),
        host_context_lens=(),
        decode_rows=16,
    )
    spans = decode_spans(plan_attention(batch, 32), window)
    expected = torch.from_numpy(span_table(contexts, rows, window))
    assert spans.count.item() == len(expected) <= len(spans.table)
    table = spans.table[: len(expected)]
    assert torch.equal(table[:, :4], expected[:, :4])
    assert table[:, 4].eq(1).all()
    of_sequence = table[:, 0].long()
    assert torch.equal(spans.ends[of_sequence], expected[:, 4:])
