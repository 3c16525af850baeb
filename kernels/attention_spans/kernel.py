"""Cuts every decode row's context into spans, once per step; shared by all layers."""

import triton
import triton.language as tl


@triton.jit
def cut(context_len, MIN_SPAN: tl.constexpr, LONG_SPAN: tl.constexpr, MAX_SPANS: tl.constexpr):
    """How a context is cut into spans: their number and length, the last one's excepted.

    By the context alone, so that a row's result does not depend on its neighbours.
    """
    span = tl.where(context_len > MIN_SPAN * 8, LONG_SPAN, MIN_SPAN)
    wanted = (context_len + MAX_SPANS - 1) // MAX_SPANS
    wanted = (wanted + MIN_SPAN - 1) // MIN_SPAN * MIN_SPAN
    span = tl.maximum(span, wanted)
    return tl.maximum((context_len + span - 1) // span, 1), span


# A number of sequences that comes for the first time must not compile the kernel anew.
@triton.jit(do_not_specialize=["num_seqs"])
def plan_spans_kernel(
    spans_ptr,  # (capacity, 4) int32: sequence, first key, last key + 1, row of partial results
    num_spans_ptr,  # (1,) int32
    context_lens_ptr,  # (num_seqs,) int32; 0 is a row that only fills up the batch
    num_seqs,
    MIN_SPAN: tl.constexpr,
    LONG_SPAN: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_seqs
):
    """One program per sequence: it finds its place behind the others' spans, and writes its own."""
    i_seq = tl.program_id(0)
    o_seq = tl.arange(0, BLOCK)
    b_context = tl.load(context_lens_ptr + o_seq, mask=o_seq < num_seqs, other=0)
    b_count, _ = cut(b_context, MIN_SPAN, LONG_SPAN, MAX_SPANS)
    first = tl.sum(tl.where(o_seq < i_seq, b_count, 0), 0)
    context_len = tl.load(context_lens_ptr + i_seq)
    count, span = cut(context_len, MIN_SPAN, LONG_SPAN, MAX_SPANS)
    o_span = tl.arange(0, MAX_SPANS)
    p_span = spans_ptr + (first + o_span) * 4
    b_mine = o_span < count
    b_zero = tl.zeros([MAX_SPANS], tl.int32)
    tl.store(p_span, b_zero + i_seq, mask=b_mine)
    tl.store(p_span + 1, o_span * span, mask=b_mine)
    tl.store(p_span + 2, tl.minimum((o_span + 1) * span, context_len), mask=b_mine)
    tl.store(p_span + 3, first + o_span, mask=b_mine)
    if i_seq == num_seqs - 1:
        tl.store(num_spans_ptr, first + count)
