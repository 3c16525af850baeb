"""Cuts the keys of every decode row into spans, once per step and window; layers share them.

Where sequences have the pages of a span in common, such as those of a prompt that all begin with,
one pass over it serves them all. What a row gets of it is the same, bit by bit.
"""

import triton
import triton.language as tl

PAGE: tl.constexpr = tl.constexpr(32)  # tokens
AT_ONCE: tl.constexpr = tl.constexpr(32)  # spans that are written


@triton.jit
def span_of(position, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """The span that a position lies in; of BOUNDS[i] .. BOUNDS[i + 1] they have LENGTHS[i]."""
    index = position * 0
    for i in tl.static_range(len(LENGTHS)):
        inside = tl.minimum(position, BOUNDS[i + 1]) - BOUNDS[i]
        index += tl.maximum(inside, 0) // LENGTHS[i]
    return index


@triton.jit
def begin_of(index, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """The first position of a span."""
    position = index * 0
    for i in tl.static_range(len(LENGTHS)):
        inside = tl.minimum(index, (BOUNDS[i + 1] - BOUNDS[i]) // LENGTHS[i])
        position += tl.maximum(inside, 0) * LENGTHS[i]
        index -= (BOUNDS[i + 1] - BOUNDS[i]) // LENGTHS[i]
    return position


@triton.jit
def seen_spans(context_len, num_rows, window, BOUNDS: tl.constexpr, LENGTHS: tl.constexpr):
    """The first key that any of the last rows sees, its span, and the last row's."""
    lowest_key = tl.maximum(context_len - num_rows - window + 1, 0)
    last_key = tl.maximum(context_len - 1, lowest_key)
    first = span_of(lowest_key, BOUNDS, LENGTHS)
    return lowest_key, first, span_of(last_key, BOUNDS, LENGTHS)


# A number of sequences that comes for the first time must not compile the kernels anew.
@triton.jit(do_not_specialize=["block_tables_stride", "num_seqs", "most_spans", "most_members"])
def share_spans_kernel(
    sharers_ptr,  # (num_seqs, most_spans, 1 + MEMBERS) int32: how many, and which sequences
    shared_ptr,  # (num_seqs, 2) int32: spans that the above has, and those that are led
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    sealed_lens_ptr,  # (num_seqs,) int32, or None
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    block_tables_stride,
    num_seqs,
    most_spans,
    most_members,  # sequences that one pass over a span can serve
    BOUNDS: tl.constexpr,
    LENGTHS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_seqs
):
    """One program per sequence: with whom it shares the pages of its spans, from the first one on.

    A span is shared whole, and by those whose rows all see all of it. Its sequences stand in their
    order; every `most_members`-th leads those up to the next, and a span that another leads has
    none of its own.
    """
    i_seq = tl.program_id(0)
    o_seq = tl.arange(0, BLOCK)
    b_alike = o_seq < num_seqs
    b_start = tl.load(query_start_ptr + o_seq, mask=b_alike, other=0)
    b_rows = tl.load(query_start_ptr + o_seq + 1, mask=b_alike, other=0) - b_start
    b_seen = tl.load(context_lens_ptr + o_seq, mask=b_alike, other=0) - b_rows
    if sealed_lens_ptr is not None:
        b_seen = tl.minimum(b_seen, tl.load(sealed_lens_ptr + o_seq, mask=b_alike, other=0))
    seen = tl.sum(tl.where(o_seq == i_seq, b_seen, 0), 0)
    p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride
    p_tables = block_tables_ptr + o_seq.to(tl.int64) * block_tables_stride
    num_led = 0
    span = 0
    sharing = num_seqs
    while (sharing > 1) & (begin_of(span + 1, BOUNDS, LENGTHS) <= seen):
        end = begin_of(span + 1, BOUNDS, LENGTHS)
        b_alike &= b_seen >= end
        for page in tl.range(begin_of(span, BOUNDS, LENGTHS) // PAGE, end // PAGE, num_stages=1):
            b_block = tl.load(p_tables + page, mask=b_alike, other=-1)
            b_alike &= b_block == tl.load(p_table + page)
        b_one = b_alike.to(tl.int32)
        sharing = tl.sum(b_one, 0)
        rank = tl.sum(tl.where(o_seq < i_seq, b_one, 0), 0)
        leads = rank % most_members == 0
        b_member = tl.cumsum(b_one, 0) - 1 - rank
        p_sharers = sharers_ptr + (i_seq * most_spans + span) * (1 + MEMBERS)
        tl.store(p_sharers, tl.where(leads, tl.minimum(sharing - rank, most_members), 0))
        b_mine = b_alike & (b_member >= 0) & (b_member < most_members)
        tl.store(p_sharers + 1 + b_member, o_seq, mask=b_mine & leads)
        num_led += leads.to(tl.int32)
        span += 1
    tl.store(shared_ptr + i_seq * 2, span)
    tl.store(shared_ptr + i_seq * 2 + 1, num_led)


@triton.jit(do_not_specialize=["num_seqs", "window", "most_spans"])
def plan_spans_kernel(
    spans_ptr,  # (capacity, 4 + MEMBERS) int32: first key, last key + 1, span, how many sequences
    num_spans_ptr,  # (1,) int32
    places_ptr,  # (num_seqs, 3) int32: partial result that span 0 would have, first span, last
    sharers_ptr,  # of `share_spans_kernel`, or None
    shared_ptr,
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32; 0 is a row that only fills up the batch
    num_seqs,
    window,  # as many keys as there can be, if there is none
    most_spans,
    BOUNDS: tl.constexpr,
    LENGTHS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_seqs
):
    """One program per sequence: it finds its place behind the others' spans, and writes its own."""
    i_seq = tl.program_id(0)
    o_seq = tl.arange(0, BLOCK)
    b_before = o_seq < i_seq
    b_context = tl.load(context_lens_ptr + o_seq, mask=b_before, other=0)
    b_start = tl.load(query_start_ptr + o_seq, mask=b_before, other=0)
    b_stop = tl.load(query_start_ptr + o_seq + 1, mask=b_before, other=0)
    _, b_first, b_last = seen_spans(b_context, b_stop - b_start, window, BOUNDS, LENGTHS)
    b_count = tl.where(b_before, b_last - b_first + 1, 0)
    i_partial = tl.sum(b_count, 0)
    i_row = i_partial
    num_shared = 0
    if sharers_ptr is not None:
        b_shared = tl.load(shared_ptr + o_seq * 2, mask=b_before, other=0)
        i_row += tl.sum(tl.load(shared_ptr + o_seq * 2 + 1, mask=b_before, other=0) - b_shared, 0)
        num_shared = tl.load(shared_ptr + i_seq * 2)
    context_len = tl.load(context_lens_ptr + i_seq)
    num_rows = tl.load(query_start_ptr + i_seq + 1) - tl.load(query_start_ptr + i_seq)
    lowest_key, first, last = seen_spans(context_len, num_rows, window, BOUNDS, LENGTHS)
    tl.store(places_ptr + i_seq * 3, i_partial - first)
    tl.store(places_ptr + i_seq * 3 + 1, first)
    tl.store(places_ptr + i_seq * 3 + 2, last)
    for span in tl.range(first, last + 1, AT_ONCE, num_stages=1):
        b_span = span + tl.arange(0, AT_ONCE)
        b_mine = b_span <= last
        b_begin = tl.maximum(begin_of(b_span, BOUNDS, LENGTHS), lowest_key // PAGE * PAGE)
        b_end = tl.minimum(begin_of(b_span + 1, BOUNDS, LENGTHS), context_len)
        b_members = b_mine.to(tl.int32)
        p_sharers = sharers_ptr
        if sharers_ptr is not None:
            p_sharers = sharers_ptr + (i_seq * most_spans + b_span) * (1 + MEMBERS)
            b_shares = b_span < num_shared
            b_members = tl.where(b_shares, tl.load(p_sharers, mask=b_shares, other=0), b_members)
        b_led = (b_members > 0).to(tl.int32)
        b_row = i_row + tl.cumsum(b_led, 0) - b_led
        i_row += tl.sum(b_led, 0)
        b_mine = b_members > 0
        p_span = spans_ptr + b_row * (4 + MEMBERS)
        tl.store(p_span, b_begin, mask=b_mine)
        tl.store(p_span + 1, b_end, mask=b_mine)
        tl.store(p_span + 2, b_span, mask=b_mine)
        tl.store(p_span + 3, b_members, mask=b_mine)
        if sharers_ptr is None:
            tl.store(p_span + 4, b_span * 0 + i_seq, mask=b_mine)
        else:
            for i in tl.range(0, tl.max(b_members, 0), num_stages=1):
                b_has = i < b_members
                b_member = tl.load(p_sharers + 1 + i, mask=b_has & b_shares, other=0)
                tl.store(p_span + 4 + i, tl.where(b_shares, b_member, i_seq), mask=b_has)
    if i_seq == num_seqs - 1:
        tl.store(num_spans_ptr, i_row)
