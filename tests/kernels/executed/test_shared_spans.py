"""Sequences that begin alike: one pass over the pages that they share serves several."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from attention_spans import begin_of, span_table
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention.launch import decode_spans, plan_attention
from appliance.kernels.ragged import RaggedBatch
from tests.kernels.executed.attending import assert_matches_reference, attend

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case, MakeCase

PAGE = 32
# The first three begin alike for two spans and more, the fourth for one, the last two not at all.
CONTEXTS, ALIKE = (300, 420, 290, 300, 200, 33), (9, 9, 8, 5, 0, 0)


def sharing_case(make_case: MakeCase, rows: int, **shape: object) -> Case:
    case = make_case((rows,) * len(CONTEXTS), CONTEXTS, decode_rows=rows, **shape)
    for table, pages in zip(case.batch.block_tables, ALIKE, strict=True):
        table[:pages] = case.batch.block_tables[0, :pages]
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
    ("kv_format", "num_heads", "rows", "passes"),
    [
        (KVFormat.FP16, 4, 1, [4, 3]),
        (KVFormat.INT4, 4, 2, [2, 2, 2, 1]),
        (KVFormat.INT8, 3, 1, [4, 3]),
        (KVFormat.FP8, 8, 1, [2, 2, 2, 1]),
        (KVFormat.INT4, 9, 1, []),  # of nine heads a tile has room for one token
    ],
)
def test_a_row_gets_the_same_bits_whoever_shares_its_pages(
    make_case: MakeCase, kv_format: KVFormat, num_heads: int, rows: int, passes: list[int]
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
    shared = [count for count in spans.table[: spans.count, 3].tolist() if count > 1]
    assert sorted(shared) == sorted(count for count in passes if count > 1)


def test_layers_with_a_window_share_no_span(make_case: MakeCase) -> None:
    case = sharing_case(make_case, 1, num_heads=4)
    assert_matches_reference(case, window=200)
    spans = decode_spans(plan_attention(case.batch, PAGE), 200, 4)
    assert spans.table[: spans.count, 3].eq(1).all()


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Contexts, rows, and how many pages each has of how many common beginnings."""
    contexts = draw(st.lists(st.integers(0, 3000), min_size=2, max_size=12))
    rows = [draw(st.integers(1, max(1, min(4, context)))) for context in contexts]
    width = max(1, -(-max(contexts) // PAGE))
    fresh = itertools.count(100)
    tables: list[list[int]] = []
    for _ in contexts:
        parent = draw(st.none() | st.integers(0, len(tables) - 1)) if tables else None
        common = draw(st.integers(0, width)) if parent is not None else 0
        begin = tables[parent][:common] if parent is not None else []
        tables.append(begin + [next(fresh) for _ in range(width - common)])
    return contexts, rows, tables


@settings(max_examples=12, derandomize=True, deadline=None)
@given(sequences(), st.integers(2, 16), st.booleans())
def test_each_span_of_a_sequence_is_in_one_pass_and_passes_are_few(
    drawn: tuple[list[int], list[int], list[list[int]]], members: int, is_sealed: bool
) -> None:
    contexts, rows, tables = drawn
    sealed = [context // PAGE * PAGE for context in contexts]
    batch = RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        num_decodes=len(contexts),
        host_query_lens=tuple(rows),
        host_context_lens=tuple(contexts),
        decode_rows=4,
    )
    if is_sealed:
        from appliance.kernels.ragged import SealedSpans

        lens = torch.tensor(sealed, dtype=torch.int32)
        batch = replace(batch, sealed=SealedSpans(lens, torch.zeros(1, 1), (), ()))
    spans = decode_spans(plan_attention(batch, PAGE), None, members)
    table = spans.table[: spans.count].tolist()
    assert len(table) <= len(spans.table)
    found = [(i, *row[:3]) for row in table for i in row[4 : 4 + row[3]]]
    expected = [tuple(row[:4]) for row in span_table(contexts, rows).tolist()]
    assert sorted(found) == expected
    # What those have in common who see all of a span; each pass serves as many as it can.
    alike: Counter[tuple[int, ...]] = Counter()
    for context, count, pages, closed in zip(contexts, rows, tables, sealed, strict=True):
        seen = min(context - count, closed) if is_sealed else context - count
        for span in itertools.count():
            if begin_of(span + 1) > seen:
                break
            alike[span, *pages[: begin_of(span + 1) // PAGE]] += 1
    passes = sum(-(-count // members) for count in alike.values())
    assert len(table) == len(expected) - sum(alike.values()) + passes
    for _, end, span, count, *sharing in table:
        assert 1 <= count <= members
        common = {tuple(tables[i][: begin_of(span + 1) // PAGE]) for i in sharing[:count]}
        assert count == 1 or (len(common) == 1 and end == begin_of(span + 1))
