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

from appliance.kernels.attention import reference
from appliance.kernels.attention import work as attention_work
from appliance.kernels.attention.launch import (
    decode_spans,
    paged_attention,
    plan_attention,
)
from appliance.kernels.attention.timed_spans import SpanPlanner, TimedAttention
from appliance.kernels.attention.work import SPAN_BOUNDS, SPAN_LENGTHS
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices
from appliance.kernels.rows.ragged import RaggedBatch
from tests.kernels.executed.attending import BF16, BOUNDS, FP16, assert_matches_reference, attend

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


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT4])
@pytest.mark.parametrize(("most_partials", "spans"), [(48, 10), (16, 3), (3, 1)])
def test_rows_without_room_for_all_their_spans_have_longer_ones(
    make_case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
    kv_format: KVFormat,
    most_partials: int,
    spans: int,
) -> None:
    """1,300 tokens are 8 spans of 128 and two of 256, or 3 of 512, or one."""
    monkeypatch.setattr(attention_work, "MOST_PARTIALS", most_partials)
    case = make_case((1, 2, 1), (1300, 150, 700), kv_format=kv_format, decode_rows=2)
    work = plan_attention(case.batch, case.cache.block_size)
    assert decode_spans(work, None).ends[0].tolist() == [0, spans - 1]
    sinks = torch.linspace(-1, 1, 3)
    assert_matches_reference(case, sinks=sinks)
    assert_matches_reference(case, window=900, sinks=sinks)


@settings(max_examples=8, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 16)), min_size=1, max_size=9),
    st.sampled_from([None, 1, 128, 4096]),
    st.sampled_from([4096, 1000, 9]),
)
def test_the_device_cuts_contexts_as_the_model_does(
    sequences: list[tuple[int, int]], window: int | None, most_partials: int
) -> None:
    rows = [min(count, max(context, 1)) for context, count in sequences]
    contexts = [context for context, _ in sequences]
    batch = RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.zeros(len(contexts), -(-max(*contexts, 1) // 32), dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        num_decodes=len(contexts),
        host_query_lens=(),
        host_context_lens=(),
        decode_rows=16,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "MOST_PARTIALS", most_partials)
        spans = decode_spans(plan_attention(batch, 32), window)
    assert spans.most * sum(rows) <= spans.num_partials <= max(most_partials, sum(rows))
    expected = torch.from_numpy(span_table(contexts, rows, window, spans.most))
    assert spans.count.item() == len(expected) <= len(spans.table)
    table = spans.table[: len(expected)]
    assert torch.equal(table[:, :4], expected[:, :4])
    assert table[:, 4].eq(1).all()
    of_sequence = table[:, 0].long()
    assert torch.equal(spans.ends[of_sequence], expected[:, 4:])


def timed_attention(
    planner: SpanPlanner, kv_format: KVFormat, context_length: int
) -> TimedAttention:
    return TimedAttention(planner, kv_format, 4, 2, 32, None, context_length)


def test_a_few_lengths_are_tried_at_each_end_of_a_context() -> None:
    work = timed_attention(SpanPlanner(), KVFormat.BF16, 1 << 20)
    assert work.entries(512) == (1024, 16384, 65536)
    tried = [[one.keys for one in work.candidates(end)] for end in work.entries(512)]
    assert tried == [[128, 256], [256, 128, 512], [512, 256, 1024]]
    assert timed_attention(SpanPlanner(), KVFormat.BF16, 1024).entries(512) == (1024,)
    wide = TimedAttention(SpanPlanner(), KVFormat.BF16, 64, 64, 256, None, 1 << 20)
    assert wide.entries(512) == (1024,), "64 KiB of a token would take 1 GiB"


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_each_timed_length_gives_the_same_attention(
    make_case: MakeCase, kv_format: KVFormat
) -> None:
    """Rows of two contexts, one of which spans two lengths."""
    case = make_case((1, 1), (1500, 700), num_heads=4, kv_format=kv_format, dtype=FP16)
    work = timed_attention(SpanPlanner(), kv_format, 4096)
    expected = reference.paged_attention(case.query.double(), case.cache, case.batch, scale=0.2)
    seen = set()
    for short in work.candidates(1024):
        for long in work.candidates(16384):
            work.use(TimedChoices({1024: short, 16384: long}))
            seen.add(work.planner.lengths)
            step = work.planner(case.batch, case.cache.block_size)
            found = paged_attention(case.query, case.cache, step, scale=0.2)
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert error < BOUNDS[FP16]
            spans = step.spans[None, max(1, *(members for _, members in step.spans))]
            first, second = (int(spans.table[place, 2]) for place in (0, 1))
            assert second - first == work.planner.lengths[0]
    assert len(seen) == 6
    work.use(TimedChoices())
    assert work.planner.lengths == SPAN_LENGTHS


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8, KVFormat.INT4_SEALED])
def test_what_is_timed_runs_with_every_cache(kv_format: KVFormat) -> None:
    work = timed_attention(SpanPlanner(), kv_format, 300)
    (entry,) = work.entries(1)
    assert entry == SPAN_BOUNDS[1]
    work.use(TimedChoices({entry: LaunchChoice(keys=256)}))
    query, caches, batch = work.inputs(entry, BF16, torch.device("cpu"))
    found = work.run(query, caches[:2], batch)
    assert isinstance(found, list)
    assert [each.shape for each in found] == [(1, 4, 32)] * 2
    assert batch.context_lens.tolist() == [300]
