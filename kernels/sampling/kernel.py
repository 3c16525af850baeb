"""Sampling on the GPU in five launches, without a sort and without a float sum.

A token's weight is exp((logit - largest) / temperature) in fixed point, so sums are the same in any
order: a row's token depends neither on how the row was cut nor on the rows beside it.

1. `scan`: largest logit of each chunk of a row, and flags for NaN and +inf.
2. `weigh`: weight of each chunk; numbers of tokens by their distance below the largest logit.
3. `cut`: the distance that the likeliest CANDIDATES tokens reach.
4. `gather`: those tokens side by side, by rising id.
5. `choose`: thresholds for top-k, top-p and the draw, each found by bisection over the bits of a
   logit; among the candidates if they suffice, as they nearly always do, else in the row.

A greedy row returns at once from 2 to 4, a row without top-k and top-p from 3 and 4.
"""

import triton
import triton.language as tl

from appliance.kernels.device.draw_by_rank import draw_by_rank, fixed, weight_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)
BINS: tl.constexpr = tl.constexpr(256)  # 32 for each octave of 1 + distance, up to 255
BIG: tl.constexpr = tl.constexpr(2147483647)
NAN: tl.constexpr = tl.constexpr(1)
INFINITE: tl.constexpr = tl.constexpr(2)


@triton.jit
def bin_of(b_x, largest):
    """Return a bin that rises with the distance below the largest logit."""
    b_bits = (1.0 + (largest - b_x)).to(tl.int32, bitcast=True)
    return tl.minimum((b_bits - 0x3F800000) >> 18, BINS - 1)


@triton.jit
def is_ordered(top_k, top_p):
    return (top_k > 0) | (top_p < 1.0)


@triton.jit
def row_status(maxima_ptr, flags_ptr, i_row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return a row's largest logit, and 0 or why it has no token: -1 NaN or none, -2 infinite."""
    o_chunk = tl.arange(0, CHUNKS)
    b_valid = o_chunk < NUM_CHUNKS
    p_chunk = i_row * CHUNKS + o_chunk
    b_max = tl.load(maxima_ptr + p_chunk, mask=b_valid, other=-float("inf"))
    b_flag = tl.load(flags_ptr + p_chunk, mask=b_valid, other=0)
    largest = tl.max(b_max, 0)
    infinite = tl.max(b_flag & INFINITE, 0) > 0
    nan = (tl.max(b_flag & NAN, 0) > 0) | (largest == -float("inf"))
    return largest, tl.where(nan, -1, tl.where(infinite, -2, 0))


@triton.jit
def scan_kernel(
    logits_ptr,  # (num_rows, vocab_size) float32, rows stride apart
    maxima_ptr,  # (num_rows, CHUNKS) float32
    places_ptr,  # (num_rows, CHUNKS) int32, the first place of each
    flags_ptr,  # (num_rows, CHUNKS) int32, NAN and INFINITE
    stride,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # NUM_CHUNKS as a power of two
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits_ptr + i_row * stride + o_id, mask=o_id < VOCAB, other=-float("inf"))
    b_nan = b_x != b_x
    b_x = tl.where(b_nan, -float("inf"), b_x)
    largest = tl.max(b_x, 0)
    place = tl.min(tl.where(b_x == largest, o_id, BIG), 0)
    has_nan = tl.max(b_nan.to(tl.int32), 0)
    flag = tl.where(has_nan > 0, NAN, 0) + tl.where(largest == float("inf"), INFINITE, 0)
    p_chunk = i_row * CHUNKS + i_chunk
    tl.store(maxima_ptr + p_chunk, largest)
    tl.store(places_ptr + p_chunk, place)
    tl.store(flags_ptr + p_chunk, flag)


@triton.jit
def weigh_kernel(
    logits_ptr,
    maxima_ptr,
    flags_ptr,
    temperature_ptr,  # (num_rows,) float32
    top_k_ptr,  # (num_rows,) int64
    top_p_ptr,  # (num_rows,) float32
    min_p_ptr,  # (num_rows,) float32
    masses_ptr,  # (num_rows, CHUNKS) int64
    counts_ptr,  # (num_rows, CHUNKS, BINS) int32
    stride,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + i_row)
    largest, status = row_status(maxima_ptr, flags_ptr, i_row, NUM_CHUNKS, CHUNKS)
    if (temperature < GREEDY_BELOW) | (status < 0):
        return
    ordered = is_ordered(tl.load(top_k_ptr + i_row), tl.load(top_p_ptr + i_row))
    # A row drawn by rank applies min-p last, after the sums for top-p.
    min_p = tl.where(ordered, 0.0, tl.load(min_p_ptr + i_row))
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits_ptr + i_row * stride + o_id, mask=o_id < VOCAB, other=-float("inf"))
    b_mass = fixed(weight_of(b_x, largest, LOG2_E / temperature), min_p)
    p_chunk = i_row * CHUNKS + i_chunk
    tl.store(masses_ptr + p_chunk, tl.sum(b_mass, 0))
    if ordered:
        b_count = tl.histogram(bin_of(b_x, largest), BINS)
        tl.store(counts_ptr + p_chunk * BINS + tl.arange(0, BINS), b_count)


@triton.jit
def cut_kernel(
    maxima_ptr,
    flags_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    counts_ptr,
    cuts_ptr,  # (num_rows,) int32, first bin that holds no candidates
    starts_ptr,  # (num_rows, CHUNKS) int32, first place of a chunk's candidates
    totals_ptr,  # (num_rows,) int32, number of candidates
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_row)
    ordered = is_ordered(tl.load(top_k_ptr + i_row), tl.load(top_p_ptr + i_row))
    _, status = row_status(maxima_ptr, flags_ptr, i_row, NUM_CHUNKS, CHUNKS)
    if (temperature < GREEDY_BELOW) | (status < 0) | (ordered == 0):
        return
    o_chunk, o_bin = tl.arange(0, CHUNKS), tl.arange(0, BINS)
    p_count = counts_ptr + (i_row * CHUNKS + o_chunk)[:, None] * BINS + o_bin[None, :]
    b_count = tl.load(p_count, mask=(o_chunk < NUM_CHUNKS)[:, None], other=0)
    b_reached = tl.cumsum(tl.sum(b_count, 0), 0)
    # The last bin has all that is far below, which is never a candidate.
    cut = tl.sum(((b_reached <= CANDIDATES) & (o_bin < BINS - 1)).to(tl.int32), 0)
    b_size = tl.sum(tl.where((o_bin < cut)[None, :], b_count, 0), 1)
    tl.store(cuts_ptr + i_row, cut)
    tl.store(starts_ptr + i_row * CHUNKS + o_chunk, tl.cumsum(b_size, 0) - b_size)
    tl.store(totals_ptr + i_row, tl.sum(b_size, 0))


@triton.jit
def gather_kernel(
    logits_ptr,
    maxima_ptr,
    flags_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    cuts_ptr,
    starts_ptr,
    values_ptr,  # (num_rows, CANDIDATES) float32, by rising id
    ids_ptr,  # (num_rows, CANDIDATES) int32
    stride,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + i_row)
    ordered = is_ordered(tl.load(top_k_ptr + i_row), tl.load(top_p_ptr + i_row))
    largest, status = row_status(maxima_ptr, flags_ptr, i_row, NUM_CHUNKS, CHUNKS)
    if (temperature < GREEDY_BELOW) | (status < 0) | (ordered == 0):
        return
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits_ptr + i_row * stride + o_id, mask=o_id < VOCAB, other=-float("inf"))
    b_kept = bin_of(b_x, largest) < tl.load(cuts_ptr + i_row)
    b_rank = tl.cumsum(b_kept.to(tl.int32), 0) - 1
    b_place = i_row * CANDIDATES + tl.load(starts_ptr + i_row * CHUNKS + i_chunk) + b_rank
    tl.store(values_ptr + b_place, b_x, mask=b_kept)
    tl.store(ids_ptr + b_place, o_id, mask=b_kept)


@triton.jit
def choose_kernel(
    logits_ptr,
    maxima_ptr,
    places_ptr,
    flags_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,  # (num_rows,) float64
    masses_ptr,
    totals_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,  # (num_rows,) int64, negative where there is none
    stride,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_row * stride
    largest, status = row_status(maxima_ptr, flags_ptr, i_row, NUM_CHUNKS, CHUNKS)
    if status < 0:
        tl.store(tokens_ptr + i_row, status.to(tl.int64))
        return
    o_chunk = tl.arange(0, CHUNKS)
    b_valid = o_chunk < NUM_CHUNKS
    temperature = tl.load(temperature_ptr + i_row)
    if temperature < GREEDY_BELOW:
        b_max = tl.load(maxima_ptr + i_row * CHUNKS + o_chunk, mask=b_valid, other=-float("inf"))
        b_place = tl.load(places_ptr + i_row * CHUNKS + o_chunk, mask=b_valid, other=BIG)
        token = tl.min(tl.where(b_max == largest, b_place, BIG), 0)
        tl.store(tokens_ptr + i_row, token.to(tl.int64))
        return
    inverse = LOG2_E / temperature
    top_k, top_p = tl.load(top_k_ptr + i_row), tl.load(top_p_ptr + i_row)
    min_p, uniform = tl.load(min_p_ptr + i_row), tl.load(uniform_ptr + i_row)
    b_mass = tl.load(masses_ptr + i_row * CHUNKS + o_chunk, mask=b_valid, other=0)
    total = tl.sum(b_mass, 0)
    if is_ordered(top_k, top_p):
        size = tl.load(totals_ptr + i_row)
        p_values = values_ptr + i_row * CANDIDATES
        b_sum = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            o_item = start + tl.arange(0, BLOCK)
            b_x = tl.load(p_values + o_item, mask=o_item < size, other=-float("inf"))
            b_sum += fixed(weight_of(b_x, largest, inverse), 0.0)
        reached = tl.sum(b_sum, 0).to(tl.float64)
        enough = (top_k == 0) & (reached >= top_p.to(tl.float64) * total.to(tl.float64))
        enough = (size > 0) & (enough | ((top_k > 0) & (top_k <= size)))
        if enough:
            place = draw_by_rank(
                p_values, size, total, uniform, top_k, top_p, min_p, largest, inverse, BLOCK
            )
            token = tl.load(ids_ptr + i_row * CANDIDATES + place)
        else:
            token = draw_by_rank(
                p_row, VOCAB, total, uniform, top_k, top_p, min_p, largest, inverse, BLOCK
            )
        tl.store(tokens_ptr + i_row, token.to(tl.int64))
        return
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    b_reached = tl.cumsum(b_mass, 0)
    i_chunk = tl.sum((b_reached <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(o_chunk < i_chunk, b_mass, 0), 0)
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(p_row + o_id, mask=o_id < VOCAB, other=-float("inf"))
    b_reached = before + tl.cumsum(fixed(weight_of(b_x, largest, inverse), min_p), 0)
    token = i_chunk * CHUNK + tl.sum((b_reached <= target).to(tl.int32), 0)
    tl.store(tokens_ptr + i_row, token.to(tl.int64))
