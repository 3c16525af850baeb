"""Penalties on the GPU: one program per stretch of a row; rows without penalties return at once.

Rows of one place, of a sequence with drafts, share the program of the first: each sees the tokens
up to its own.
"""

import triton
import triton.language as tl

IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["num_rows"])
def penalize_kernel(
    logits_ptr,  # (num_rows, VOCAB) float32, rows stride apart
    seen_ptr,  # (num_places, VOCAB) int32
    places_ptr,  # (num_rows,) int32
    counted_ptr,  # (num_rows,) int32
    token_ids_ptr,  # (num_rows,) int64
    repetition_ptr,  # (num_rows,) float32
    presence_ptr,  # (num_rows,) float64
    frequency_ptr,  # (num_rows,) float64
    stride,
    num_rows,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,  # otherwise all rows' tokens are counted, and taken back row by row
):
    i_first, i_chunk = tl.program_id(0), tl.program_id(1)
    place = tl.load(places_ptr + i_first)
    if place < 0:
        return
    if tl.load(places_ptr + i_first - 1, mask=i_first > 0, other=-1) == place:
        return
    i_end = i_first + 1
    while tl.load(places_ptr + i_end, mask=i_end < num_rows, other=-1) == place:
        i_end += 1
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_mask = o_id < VOCAB
    p_seen = seen_ptr + place.to(tl.int64) * VOCAB + o_id
    b_before = tl.load(p_seen, mask=b_mask, other=0)
    b_seen = b_before
    for i_step in range(i_end - i_first):
        i_row = i_first + i_step if COUNTS else i_end - 1 - i_step
        b_read = o_id == tl.load(token_ids_ptr + i_row)
        b_counted = tl.where(b_read, tl.load(counted_ptr + i_row), 0)
        if COUNTS:
            b_seen += b_counted
        b_found = b_seen > 0
        b_count = b_seen % IN_PROMPT
        repetition = tl.load(repetition_ptr + i_row)
        b_subtracted = tl.load(presence_ptr + i_row) + tl.load(frequency_ptr + i_row) * b_count
        p_logit = logits_ptr + i_row.to(tl.int64) * stride + o_id
        b_x = tl.load(p_logit, mask=b_found, other=0.0)
        b_x = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
        b_x = tl.where(b_count > 0, b_x - b_subtracted.to(tl.float32), b_x)
        tl.store(p_logit, b_x, mask=b_found)
        if not COUNTS:
            b_seen -= b_counted
    if COUNTS:
        tl.store(p_seen, b_seen, mask=b_mask & (b_seen != b_before))
