"""Cuts the keys of every decode row into spans, once per step and window; layers share them.

Where the longest sequence would have more spans than there is room for, all spans of the step are
twice as long, or four times, and so on.

Sequences beside each other whose spans lie in the same blocks, as those of a common prompt do,
share passes over them. A row gets the same bits from a shared pass as from its own.
"""

import triton
import triton.language as tl

PAGE: tl.constexpr = tl.constexpr(32)  # tokens
AT_ONCE: tl.constexpr = tl.constexpr(32)  # spans that are written
PAGES: tl.constexpr = tl.constexpr(128)  # that are compared at a time


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
def seen_spans(context_len, num_rows, window, shift, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the first key that any of the last rows sees, its span, and the last row's span.

    Spans are `2 ** shift` times as long as BOUNDS and LENGTHS say.
    """
    lowest_key = tl.maximum(context_len - num_rows - window + 1, 0)
    last_key = tl.maximum(context_len - 1, lowest_key)
    first = span_of(lowest_key >> shift, BOUNDS, LENGTHS)
    return lowest_key, first, span_of(last_key >> shift, BOUNDS, LENGTHS)


# A new number of sequences must not recompile the kernels.
@triton.jit(do_not_specialize=["block_tables_stride", "most_members"])
def share_spans_kernel(
    shared_ptr,  # (num_seqs,) int32
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    sealed_lens_ptr,  # (num_seqs,) int32, or None
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    block_tables_stride,
    most_members,  # sequences that a pass can serve
):
    """Count the leading blocks that one sequence has in common with the one before it.

    All rows of both see all of them. The first of every `most_members` sequences shares none with
    the one before.
    """
    i_seq = tl.program_id(0)
    o_page = tl.arange(0, PAGES)
    pages = 0
    if i_seq % most_members > 0:
        start = tl.load(query_start_ptr + i_seq)
        before = tl.load(query_start_ptr + i_seq - 1) - start
        rows = tl.load(query_start_ptr + i_seq + 1) - start
        seen = tl.minimum(
            tl.load(context_lens_ptr + i_seq) - rows,
            tl.load(context_lens_ptr + i_seq - 1) + before,
        )
        if sealed_lens_ptr is not None:
            seen = tl.minimum(seen, tl.load(sealed_lens_ptr + i_seq))
            seen = tl.minimum(seen, tl.load(sealed_lens_ptr + i_seq - 1))
        p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride
        end = 0
        while (pages == end) & (end * PAGE < seen):
            b_page = end + o_page
            b_seen = (b_page + 1) * PAGE <= seen
            b_own = tl.load(p_table + b_page, mask=b_seen, other=-1)
            b_other = tl.load(p_table - block_tables_stride + b_page, mask=b_seen, other=-2)
            end += PAGES
            pages = tl.min(tl.where(b_own == b_other, end, b_page), 0)
    tl.store(shared_ptr + i_seq, pages)


@triton.jit(do_not_specialize=["num_seqs", "window", "most_members", "most_spans"])
def plan_spans_kernel(
    spans_ptr,  # (capacity, COLUMNS) int32, see `DecodeSpans.table`
    num_spans_ptr,  # (1,) int32
    ends_ptr,  # (num_seqs, 2) int32, the first and the last span of each sequence
    shared_ptr,  # (num_seqs,) int32, see `share_spans_kernel`; None where sequences never share
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32; 0 for a padding row
    num_seqs,
    window,  # keys; without a window the most that there can be
    most_members,  # sequences that a pass can serve; 1 if none share in this step
    most_spans,  # of a sequence
    BOUNDS: tl.constexpr,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_seqs
):
    """Write one sequence's spans behind those of earlier sequences; one program per sequence.

    Leaves out those that it shares with the sequence before it, which are in that one's passes.
    """
    i_seq = tl.program_id(0)
    o_seq = tl.arange(0, BLOCK)
    b_exists = o_seq < num_seqs
    b_context = tl.load(context_lens_ptr + o_seq, mask=b_exists, other=0)
    b_rows = tl.load(query_start_ptr + o_seq + 1, mask=b_exists, other=0)
    b_rows -= tl.load(query_start_ptr + o_seq, mask=b_exists, other=0)
    b_count = b_rows
    shift = -1
    longest = most_spans + 1
    while longest > most_spans:
        shift += 1
        _, b_first, b_last = seen_spans(b_context, b_rows, window, shift, BOUNDS, LENGTHS)
        b_count = b_last - b_first + 1
        longest = tl.max(b_count, 0)
    b_before = o_seq < i_seq
    b_skipped = b_count * 0
    if shared_ptr is not None:
        b_pages = tl.load(shared_ptr + o_seq, mask=b_exists & (most_members > 1), other=0)
        b_skipped = span_of(b_pages * PAGE >> shift, BOUNDS, LENGTHS)
        b_count -= b_skipped
    i_row = tl.sum(tl.where(b_before, b_count, 0), 0)
    context_len = tl.load(context_lens_ptr + i_seq)
    num_rows = tl.load(query_start_ptr + i_seq + 1) - tl.load(query_start_ptr + i_seq)
    lowest_key, first, last = seen_spans(context_len, num_rows, window, shift, BOUNDS, LENGTHS)
    # The last sequence that passes of this one may serve.
    i_last = tl.minimum(i_seq // most_members * most_members + most_members, num_seqs) - 1
    tl.store(ends_ptr + i_seq * 2, first)
    tl.store(ends_ptr + i_seq * 2 + 1, last)
    if shared_ptr is not None:
        first = tl.maximum(first, tl.sum(tl.where(o_seq == i_seq, b_skipped, 0), 0))
    for span in tl.range(first, last + 1, AT_ONCE, num_stages=1):
        b_span = span + tl.arange(0, AT_ONCE)
        b_mine = b_span <= last
        b_begin = begin_of(b_span, BOUNDS, LENGTHS) << shift
        b_begin = tl.maximum(b_begin, lowest_key // PAGE * PAGE)
        b_whole = begin_of(b_span + 1, BOUNDS, LENGTHS) << shift
        b_end = tl.minimum(b_whole, context_len)
        b_members = b_span * 0 + 1
        if shared_ptr is not None:
            b_shares = b_mine
            for i in tl.range(i_seq + 1, i_last + 1, num_stages=1):
                b_shares &= tl.load(shared_ptr + i) * PAGE >= b_whole
                b_members += b_shares.to(tl.int32)
        p_span = spans_ptr + (i_row + b_span - first) * COLUMNS
        tl.store(p_span, b_span * 0 + i_seq, mask=b_mine)
        tl.store(p_span + 1, b_begin, mask=b_mine)
        tl.store(p_span + 2, b_end, mask=b_mine)
        tl.store(p_span + 3, b_span, mask=b_mine)
        tl.store(p_span + 4, b_members, mask=b_mine)
    if i_seq == num_seqs - 1:
        tl.store(num_spans_ptr, i_row + last - first + 1)
