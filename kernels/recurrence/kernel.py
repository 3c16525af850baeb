"""States that map keys to values on the GPU, passed over by rows or by chunks of rows.

By rows, a program keeps a part of one head's state in registers. In chunks, `relate_kernel` finds
out, for all chunks at once, how rows of a chunk bear on each other; then `pass_kernel` takes a
part of a head's state through the chunks of a sequence by matrix products (the WY form of arXiv
2406.06484 with the decays of arXiv 2412.06464; without corrections, that of arXiv 2405.21060).
Products are those of float32 (three of tf32 each), sums of decays never take differences.
"""

import triton
import triton.language as tl

from appliance.kernels.device.kept_state import as_kept

LARGE: tl.constexpr = tl.constexpr(20.0)  # softplus of more is the same number
SMALL: tl.constexpr = tl.constexpr(0.125)  # four terms of the series reach float32


@triton.jit
def softplus(b_x):
    """Return log(1 + exp(x)), as exact where it is small."""
    b_exp = tl.exp(tl.minimum(b_x, LARGE))
    b_z = b_exp / (2.0 + b_exp)  # log(1 + y) is twice the inverse hyperbolic tangent of y / (2 + y)
    b_square = b_z * b_z
    b_series = 1.0 + b_square * (1 / 3 + b_square * (1 / 5 + b_square * (1 / 7)))
    b_found = tl.where(b_exp < SMALL, 2.0 * b_z * b_series, tl.log(1.0 + b_exp))
    return tl.where(b_x > LARGE, b_x, b_found)


@triton.jit
def size_of_step(step_ptr, bias_ptr, o_step, i_head, mask):
    """The size of rows' steps in time; 0 for none."""
    b_step = tl.load(step_ptr + o_step, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, softplus(b_step + tl.load(bias_ptr + i_head)), 0.0)


@triton.jit
def log_decay(step_ptr, rate_ptr, bias_ptr, o_step, i_head, mask):
    """The logarithm of what rows multiply the state by; 0 for none."""
    return -tl.load(rate_ptr + i_head) * size_of_step(step_ptr, bias_ptr, o_step, i_head, mask)


@triton.jit
def taken_up(step_ptr, share_ptr, bias_ptr, o_step, i_head, mask, CORRECTS: tl.constexpr):
    """The share of the error, or of the value, that rows put into the state; 0 for none."""
    if CORRECTS:
        b_share = tl.load(share_ptr + o_step, mask=mask, other=0.0).to(tl.float32)
        return tl.where(mask, tl.sigmoid(b_share), 0.0)
    else:
        return size_of_step(step_ptr, bias_ptr, o_step, i_head, mask)


@triton.jit
def inverse_length(b_squares, CORRECTS: tl.constexpr, EPSILON: tl.constexpr):
    """Factors that scale keys or queries to length 1, if the rule does, by their squares' sums."""
    if CORRECTS:
        return tl.rsqrt(b_squares + EPSILON)
    else:
        return tl.full(b_squares.shape, 1.0, tl.float32)


@triton.jit
def row_kernel(
    out_ptr,  # (num_tokens, num_heads, VALUE_DIM) float32
    query_ptr,  # (num_tokens, key heads, KEY_DIM) float32, rows query_stride apart
    key_ptr,
    value_ptr,  # (num_tokens, num_heads, VALUE_DIM) float32
    step_ptr,  # (num_tokens, num_heads), rows step_stride apart; softplus makes a size of it
    share_ptr,  # the same, of the error that is taken up before its sigmoid; None without CORRECTS
    rate_ptr,  # (num_heads,) float32, of the states' decay
    bias_ptr,  # (num_heads,) float32, added to steps
    state_ptr,  # (num_slots, num_heads, KEY_DIM, VALUE_DIM), slots state_stride apart
    first_ptr,  # (num_spans,) int64, the first row of each, first_stride apart
    lens_ptr,  # (num_spans,) int64
    slots_ptr,  # (num_spans,) int64
    goes_on_ptr,  # (num_spans,) bool
    first_stride,
    step_stride,
    query_stride,
    key_stride,
    value_stride,
    state_stride,
    num_heads,
    scale,  # of queries
    CORRECTS: tl.constexpr,
    SHARED: tl.constexpr,  # heads of one key head
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FEWEST_CHUNKED: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Run the rows of one sequence one after another, for some values of one head."""
    i_span, i_head = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(lens_ptr + i_span)
    if num_rows >= FEWEST_CHUNKED:
        return
    o_key = tl.arange(0, KEY_PADDED)
    o_value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    b_key_mask, b_value_mask = o_key < KEY_DIM, o_value < VALUE_DIM
    b_mask = b_key_mask[:, None] & b_value_mask[None, :]
    i_state = tl.load(slots_ptr + i_span) * state_stride + i_head * (KEY_DIM * VALUE_DIM)
    p_state = state_ptr + i_state
    p_state = p_state + o_key[:, None] * VALUE_DIM + o_value[None, :]
    goes_on = tl.load(goes_on_ptr + i_span) != 0
    b_state = tl.load(p_state, mask=b_mask & goes_on, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + i_span * first_stride)
    i_key_head = i_head // SHARED
    for i in tl.range(0, num_rows, num_stages=1):
        i_row = first + i
        p_query = query_ptr + i_row * query_stride + i_key_head * KEY_DIM
        p_key = key_ptr + i_row * key_stride + i_key_head * KEY_DIM
        b_query = tl.load(p_query + o_key, mask=b_key_mask, other=0.0)
        b_key = tl.load(p_key + o_key, mask=b_key_mask, other=0.0)
        p_value = value_ptr + i_row * value_stride + i_head * VALUE_DIM
        b_value = tl.load(p_value + o_value, mask=b_value_mask, other=0.0)
        i_step = i_row * step_stride + i_head
        b_state *= tl.exp(log_decay(step_ptr, rate_ptr, bias_ptr, i_step, i_head, i_row >= 0))
        if CORRECTS:
            b_query *= tl.rsqrt(tl.sum(b_query * b_query, 0) + EPSILON) * scale
            b_key *= tl.rsqrt(tl.sum(b_key * b_key, 0) + EPSILON)
            b_value -= tl.sum(b_key[:, None] * b_state, 0)
        taken = taken_up(step_ptr, share_ptr, bias_ptr, i_step, i_head, i_row >= 0, CORRECTS)
        b_state += b_key[:, None] * (b_value * taken)[None, :]
        p_out = out_ptr + (i_row * num_heads + i_head) * VALUE_DIM + o_value
        tl.store(p_out, tl.sum(b_query[:, None] * b_state, 0), mask=b_value_mask)
    tl.store(p_state, as_kept(b_state, state_ptr), mask=b_mask)


@triton.jit
def relate_kernel(
    reads_ptr,  # (num_chunks, num_heads, CHUNK, CHUNK) float32: what a row reads of another
    solves_ptr,  # the same: what of another's error a row takes up; None without CORRECTS
    logs_ptr,  # (num_tokens, num_heads) float32: the logarithm of each row's decay
    query_ptr,  # these as in row_kernel
    key_ptr,
    step_ptr,
    share_ptr,
    rate_ptr,
    bias_ptr,
    first_ptr,
    lens_ptr,
    chunk_spans_ptr,  # (num_chunks,) int64
    chunk_starts_ptr,  # (num_spans,) int64, the first chunk of each
    first_stride,
    step_stride,
    query_stride,
    key_stride,
    num_heads,
    scale,
    CORRECTS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Relate the rows of one chunk in one head.

    With a change u of the state by each row, S = decayed S0 + sum of decayed k u^T. Changes solve
    (I + A) u = share * (v - decayed S0^T k), where A is a triangle below the diagonal. Its inverse
    is made row after row, which is stable where powers of A (keys that repeat) are not.
    """
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    i_span = tl.load(chunk_spans_ptr + i_chunk)
    before = (i_chunk - tl.load(chunk_starts_ptr + i_span)) * CHUNK
    left = tl.load(lens_ptr + i_span) - before
    o_place, o_key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_row = tl.load(first_ptr + i_span * first_stride) + before + o_place
    b_rows = o_place < left
    o_head = i_head // SHARED * KEY_DIM
    p_query = query_ptr + o_row[:, None] * query_stride + o_head
    p_key = key_ptr + o_row * key_stride + o_head
    b_reads = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_alike = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_query_squares = tl.zeros((CHUNK,), tl.float32)
    b_key_squares = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, KEY_DIM, BLOCK_K, num_stages=1):
        b_keys = start + o_key < KEY_DIM
        b_mask = b_rows[:, None] & b_keys[None, :]
        b_query = tl.load(p_query + (start + o_key)[None, :], mask=b_mask, other=0.0)
        b_key = tl.load(p_key[:, None] + (start + o_key)[None, :], mask=b_mask, other=0.0)
        b_across = tl.trans(b_key)
        b_reads = tl.dot(b_query, b_across, b_reads, input_precision="tf32x3")
        if CORRECTS:
            b_alike = tl.dot(b_key, b_across, b_alike, input_precision="tf32x3")
        b_query_squares += tl.sum(b_query * b_query, 1)
        b_key_squares += tl.sum(b_key * b_key, 1)
    o_step = o_row * step_stride + i_head
    b_log = log_decay(step_ptr, rate_ptr, bias_ptr, o_step, i_head, b_rows)
    tl.store(logs_ptr + o_row * num_heads + i_head, b_log, mask=b_rows)
    # Row i, column j: the decay after row j, up to row i.
    b_after = o_place[:, None] > o_place[None, :]
    b_decay = tl.exp(tl.cumsum(tl.where(b_after, b_log[:, None], 0.0), 0))
    b_key_factor = inverse_length(b_key_squares, CORRECTS, EPSILON)
    b_query_factor = inverse_length(b_query_squares, CORRECTS, EPSILON) * scale
    b_decay *= b_key_factor[None, :]
    b_reads = b_reads * b_decay * b_query_factor[:, None]
    b_reads = tl.where(o_place[:, None] >= o_place[None, :], b_reads, 0.0)
    o_pair = o_place[:, None] * CHUNK + o_place[None, :]
    i_pair = (i_chunk * num_heads + i_head).to(tl.int64) * (CHUNK * CHUNK)
    tl.store(reads_ptr + i_pair + o_pair, b_reads)
    if CORRECTS:
        b_share = taken_up(step_ptr, share_ptr, bias_ptr, o_step, i_head, b_rows, CORRECTS)
        b_alike = b_alike * b_decay * (b_share * b_key_factor)[:, None]
        b_across = tl.trans(tl.where(b_after, b_alike, 0.0))
        b_inverse = tl.where(o_place[:, None] == o_place[None, :], 1.0, 0.0)
        for i in tl.range(1, tl.minimum(left, CHUNK), num_stages=1):
            b_weight = tl.sum(tl.where(o_place[None, :] == i, b_across, 0.0), 1)
            b_row = tl.sum(b_weight[:, None] * b_inverse, 0)
            b_inverse -= tl.where(o_place[:, None] == i, b_row[None, :], 0.0)
        tl.store(solves_ptr + i_pair + o_pair, b_inverse * b_share[None, :])


@triton.jit
def pass_kernel(
    out_ptr,  # these as in row_kernel
    query_ptr,
    key_ptr,
    value_ptr,
    rate_ptr,
    state_ptr,  # (num_spans, num_heads, KEY_DIM, VALUE_DIM) float32, of each span
    first_ptr,
    lens_ptr,
    goes_on_ptr,
    first_stride,
    query_stride,
    key_stride,
    value_stride,
    num_heads,
    scale,
    reads_ptr,  # these as in relate_kernel
    solves_ptr,
    logs_ptr,
    chunk_starts_ptr,
    CORRECTS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FEWEST_CHUNKED: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Run the chunks of one sequence one after another, for some values of one head.

    The state stays in memory, so that few of its keys are in registers at a time.
    """
    i_span, i_head = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(lens_ptr + i_span)
    if num_rows < FEWEST_CHUNKED:
        return
    o_place, o_key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    b_value_mask = o_value < VALUE_DIM
    i_state = i_span.to(tl.int64) * num_heads + i_head
    p_state = state_ptr + i_state * (KEY_DIM * VALUE_DIM) + o_value
    goes_on = tl.load(goes_on_ptr + i_span) != 0
    first = tl.load(first_ptr + i_span * first_stride)
    o_head = i_head // SHARED * KEY_DIM
    o_pair = o_place[:, None] * CHUNK + o_place[None, :]
    i_pair = (tl.load(chunk_starts_ptr + i_span) * num_heads + i_head) * (CHUNK * CHUNK)
    for before in tl.range(0, num_rows, CHUNK, num_stages=1):
        o_row = first + before + o_place
        b_rows = before + o_place < num_rows
        o_out = o_row * num_heads + i_head
        p_query = query_ptr + o_row * query_stride + o_head
        p_key = key_ptr + o_row * key_stride + o_head
        b_known = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        b_out = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        b_query_squares = tl.zeros((CHUNK,), tl.float32)
        b_key_squares = tl.zeros((CHUNK,), tl.float32)
        for start in tl.range(0, KEY_DIM, BLOCK_K, num_stages=1):
            i_key = start + o_key
            b_keys = b_rows[:, None] & (i_key < KEY_DIM)[None, :]
            b_held = (i_key < KEY_DIM)[:, None] & b_value_mask[None, :]
            b_held = b_held & (goes_on | (before > 0))
            b_state = tl.load(p_state[None, :] + i_key[:, None] * VALUE_DIM, mask=b_held, other=0.0)
            b_query = tl.load(p_query[:, None] + i_key[None, :], mask=b_keys, other=0.0)
            b_out = tl.dot(b_query, b_state, b_out, input_precision="tf32x3")
            if CORRECTS:
                b_key = tl.load(p_key[:, None] + i_key[None, :], mask=b_keys, other=0.0)
                b_known = tl.dot(b_key, b_state, b_known, input_precision="tf32x3")
                b_query_squares += tl.sum(b_query * b_query, 1)
                b_key_squares += tl.sum(b_key * b_key, 1)
        b_key_factor = inverse_length(b_key_squares, CORRECTS, EPSILON)
        b_log = tl.load(logs_ptr + o_out, mask=b_rows, other=0.0)
        b_since = tl.exp(tl.cumsum(b_log, 0))
        b_mask = b_rows[:, None] & b_value_mask[None, :]
        p_value = value_ptr + o_row[:, None] * value_stride + i_head * VALUE_DIM
        b_change = tl.load(p_value + o_value[None, :], mask=b_mask, other=0.0)
        if CORRECTS:
            b_change -= b_known * (b_since * b_key_factor)[:, None]
            b_solves = tl.load(solves_ptr + i_pair + o_pair)
            b_change = tl.dot(b_solves, b_change, input_precision="tf32x3")
        else:
            b_change *= (b_log / -tl.load(rate_ptr + i_head))[:, None]  # by the sizes of steps
        b_query_factor = inverse_length(b_query_squares, CORRECTS, EPSILON) * scale
        b_out *= (b_since * b_query_factor)[:, None]
        b_reads = tl.load(reads_ptr + i_pair + o_pair)
        b_out = tl.dot(b_reads, b_change, b_out, input_precision="tf32x3")
        p_out = out_ptr + o_out[:, None] * VALUE_DIM + o_value[None, :]
        tl.store(p_out, b_out, mask=b_mask)
        # The decay after each row, up to the last of the chunk.
        b_next = (before + o_place + 1 < num_rows) & (o_place < CHUNK - 1)
        b_later = tl.load(logs_ptr + o_out + num_heads, mask=b_next, other=0.0)
        b_until = tl.exp(tl.cumsum(b_later, 0, reverse=True)) * b_key_factor
        kept = tl.exp(tl.sum(b_log, 0))
        tl.debug_barrier()  # all have read the state
        for start in tl.range(0, KEY_DIM, BLOCK_K, num_stages=1):
            i_key = start + o_key
            b_keys = b_rows[:, None] & (i_key < KEY_DIM)[None, :]
            b_stored = (i_key < KEY_DIM)[:, None] & b_value_mask[None, :]
            b_held = b_stored & (goes_on | (before > 0))
            p_held = p_state[None, :] + i_key[:, None] * VALUE_DIM
            b_state = tl.load(p_held, mask=b_held, other=0.0) * kept
            b_key = tl.load(p_key[:, None] + i_key[None, :], mask=b_keys, other=0.0)
            b_put = tl.trans(b_key * b_until[:, None])
            tl.store(
                p_held, tl.dot(b_put, b_change, b_state, input_precision="tf32x3"), mask=b_stored
            )
        tl.debug_barrier()  # and all have written it
        i_pair += num_heads * (CHUNK * CHUNK)
