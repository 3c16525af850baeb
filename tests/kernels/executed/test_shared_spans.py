"""Sequences with a common beginning: one pass over the blocks that they share serves several."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_spans import begin_of, span_factor, span_table

from appliance.kernels.attention import work as attention_work
from appliance.kernels.attention.launch import decode_spans, plan_attention
from appliance.kernels.attention.work import span_of
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch, SealedSpans
from tests.kernels.executed.attending import assert_matches_reference, attend

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case, MakeCase

PAGE = 32
# The blocks of the first that others begin with; two and more spans are 8 blocks, one is 4.
CONTEXTS = (300, 300, 420, 290, 33, 200)
COMMON_BLOCKS = (9, 5, 9, 8, 0, 0)


def sharing_case(make_case: MakeCase, rows: int, **shape: object) -> Case:
    case = make_case((rows,) * len(CONTEXTS), CONTEXTS, decode_rows=rows, **shape)
    for table, blocks in zip(case.batch.block_tables, COMMON_BLOCKS, strict=True):
        table[:blocks] = case.batch.block_tables[0, :blocks]
    return case


def alone(case: Case, sequence: int) -> Case:
    start, end = case.batch.query_start[sequence : sequence + 2].tolist()
    batch = replace(
        case.batch,
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        context_lens=case.batch.context_lens[sequence : sequence + 1],
        block_tables=case.batch.block_tables[sequence : sequence + 1],
        num_decodes=1,
        host_query_lens=(end - start,),
        host_context_lens=(CONTEXTS[sequence],),
    )
    return replace(case, query=case.query[start:end], batch=batch)


@pytest.mark.parametrize(
    ("kv_format", "num_heads", "rows", "shared"),
    [
        (KVFormat.FP16, 4, 1, [2, 4]),
        (KVFormat.INT4, 4, 2, [2, 2, 2]),
        (KVFormat.INT8, 3, 1, [2, 4]),
        (KVFormat.FP8, 8, 1, [2, 2, 2]),
        (KVFormat.INT4, 9, 1, []),  # a tile has room for one token of nine heads
    ],
)
def test_a_row_gets_the_same_bits_whoever_shares_its_blocks(
    make_case: MakeCase, kv_format: KVFormat, num_heads: int, rows: int, shared: list[int]
) -> None:
    case = sharing_case(make_case, rows, num_heads=num_heads, kv_format=kv_format)
    sinks = torch.linspace(-1, 1, num_heads)
    assert_matches_reference(case, sinks=sinks)
    together = attend(case, sinks=sinks)
    for i in range(len(CONTEXTS)):
        own = together[i * rows : (i + 1) * rows]
        assert torch.equal(attend(alone(case, i), sinks=sinks), own), i
    members = max(1, 16 // num_heads // rows)
    spans = decode_spans(plan_attention(case.batch, PAGE), None, members)
    passes = spans.table[: spans.count, 4].tolist()
    assert sorted(count for count in passes if count > 1) == shared


def test_layers_with_a_window_share_no_span(make_case: MakeCase) -> None:
    case = sharing_case(make_case, 1, num_heads=4)
    assert_matches_reference(case, window=200)
    spans = decode_spans(plan_attention(case.batch, PAGE), 200, 4)
    assert spans.table[: spans.count, 4].eq(1).all()


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Contexts, rows, and block tables, of which many begin like the one before."""
    contexts = draw(st.lists(st.integers(0, 3000), min_size=2, max_size=12))
    rows = [draw(st.integers(1, max(1, min(4, context)))) for context in contexts]
    width = max(1, -(-max(contexts) // PAGE))
    fresh = itertools.count(100)
    tables: list[list[int]] = []
    for _ in contexts:
        # Mostly the one before: others share nothing.
        parent = draw(st.sampled_from((None, 0, -1, -1, -1))) if tables else None
        common = draw(st.integers(0, width)) if parent is not None else 0
        begin = tables[parent][:common] if parent is not None else []
        tables.append(begin + [next(fresh) for _ in range(width - common)])
    return contexts, rows, tables


@settings(max_examples=12, derandomize=True)
@given(sequences(), st.integers(2, 4), st.booleans(), st.sampled_from([4096, 60]))
def test_each_span_of_a_sequence_is_in_one_pass_and_passes_are_few(
    drawn: tuple[list[int], list[int], list[list[int]]],
    members: int,
    is_sealed: bool,
    most_partials: int,
) -> None:
    contexts, rows, tables = drawn
    sealed = [context // PAGE * PAGE for context in contexts]
    starts = [0, *itertools.accumulate(rows)]
    batch = RaggedBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        num_decodes=len(contexts),
        host_query_lens=tuple(rows),
        host_context_lens=tuple(contexts),
        decode_rows=4,
    )
    if is_sealed:
        lens = torch.tensor(sealed, dtype=torch.int32)
        batch = replace(batch, sealed=SealedSpans(lens, torch.zeros(1, 1), (), ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "MOST_PARTIALS", most_partials)
        spans = decode_spans(plan_attention(batch, PAGE), None, members)
    factor = span_factor(contexts, rows, None, spans.most)
    table = spans.table[: spans.count].tolist()
    assert len(table) <= len(spans.table)

    served = []
    for sequence, begin, end, span, count in table:
        assert count <= members
        sharing = range(sequence, sequence + count)
        whole = factor * begin_of(span + 1)
        common = {tuple(tables[i][: whole // PAGE]) for i in sharing}
        assert count == 1 or (len(common) == 1 and end == whole)
        served += [(i, begin, end, span) for i in sharing]
    expected = [tuple(row[:4]) for row in span_table(contexts, rows, None, spans.most).tolist()]
    assert sorted(served) == expected

    # Who sees a span whole that the one before sees whole, in the same blocks, is served with it.
    shared = 0
    for i in range(1, len(contexts)):
        seen = max(0, min(contexts[j] - rows[j] for j in (i - 1, i)))
        if is_sealed:
            seen = min(seen, sealed[i - 1], sealed[i])
        pairs = zip(tables[i - 1][: seen // PAGE], tables[i], strict=False)
        alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if i % min(members, len(contexts)):
            shared += span_of(alike * PAGE // factor)
    assert len(table) == len(expected) - shared
