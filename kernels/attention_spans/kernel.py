"""Cuts the keys of every decode row into spans, once per step and window; layers share them."""

import triton
import triton.language as tl

PAGE: tl.constexpr = tl.constexpr(32)  # tokens
AT_ONCE: tl.constexpr = tl.constexpr(32)  # spans that are written


@triton.jit
def span_of(position, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the span of a position; BOUNDS[i] .. BOUNDS[i + 1] has spans of LENGTHS[i] tokens."""
    index = position * 0
    for i in tl.static_range(len(LENGTHS)):
        inside = tl.minimum(position, BOUNDS[i + 1]) - BOUNDS[i]
        index += tl.maximum(inside, 0) // LENGTHS[i]
    return index


@triton.jit
def begin_of(index, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the first position of a span."""
    position = index * 0
    for i in tl.static_range(len(LENGTHS)):
        inside = tl.minimum(index, (BOUNDS[i + 1] - BOUNDS[i]) // LENGTHS[i])
        position += tl.maximum(inside, 0) * LENGTHS[i]
        index -= (BOUNDS[i + 1] - BOUNDS[i]) // LENGTHS[i]
    return position


@triton.jit
def seen_spans(context_len, num_rows, window, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the first key that any of the last rows sees, its span, and the last row's span."""
    lowest_key = tl.maximum(context_len - num_rows - window + 1, 0)
    last_key = tl.maximum(context_len - 1, lowest_key)
    first = span_of(lowest_key, BOUNDS, LENGTHS)
    return lowest_key, first, span_of(last_key, BOUNDS, LENGTHS)


# A new number of sequences must not recompile the kernel.
@triton.jit(do_not_specialize=["num_seqs", "window"])
def plan_spans_kernel(
    spans_ptr,  # (capacity, COLUMNS) int32: sequence, first key, last key + 1, span, first, last
    num_spans_ptr,  # (1,) int32
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32; 0 for a padding row
    num_seqs,
    window,  # keys; without a window the most that there can be
    BOUNDS: tl.constexpr,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_seqs
):
    """Write one sequence's spans behind those of earlier sequences; one program per sequence."""
    i_seq = tl.program_id(0)
    o_seq = tl.arange(0, BLOCK)
    b_before = o_seq < i_seq
    b_context = tl.load(context_lens_ptr + o_seq, mask=b_before, other=0)
    b_start = tl.load(query_start_ptr + o_seq, mask=b_before, other=0)
    b_stop = tl.load(query_start_ptr + o_seq + 1, mask=b_before, other=0)
    _, b_first, b_last = seen_spans(b_context, b_stop - b_start, window, BOUNDS, LENGTHS)
    i_row = tl.sum(tl.where(b_before, b_last - b_first + 1, 0), 0)
    context_len = tl.load(context_lens_ptr + i_seq)
    num_rows = tl.load(query_start_ptr + i_seq + 1) - tl.load(query_start_ptr + i_seq)
    lowest_key, first, last = seen_spans(context_len, num_rows, window, BOUNDS, LENGTHS)
    for span in tl.range(first, last + 1, AT_ONCE, num_stages=1):
        b_span = span + tl.arange(0, AT_ONCE)
        b_mine = b_span <= last
        b_begin = tl.maximum(begin_of(b_span, BOUNDS, LENGTHS), lowest_key // PAGE * PAGE)
        b_end = tl.minimum(begin_of(b_span + 1, BOUNDS, LENGTHS), context_len)
        p_span = spans_ptr + (i_row + b_span - first) * COLUMNS
        tl.store(p_span, b_span * 0 + i_seq, mask=b_mine)
        tl.store(p_span + 1, b_begin, mask=b_mine)
        tl.store(p_span + 2, b_end, mask=b_mine)
        tl.store(p_span + 3, b_span, mask=b_mine)
        tl.store(p_span + 4, b_span * 0 + first, mask=b_mine)
        tl.store(p_span + 5, b_span * 0 + last, mask=b_mine)
    if i_seq == num_seqs - 1:
        tl.store(num_spans_ptr, i_row + last - first + 1)
