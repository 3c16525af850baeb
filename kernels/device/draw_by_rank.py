"""Draws by top-k, top-p and min-p from a list of logits, by bisection over the bits of a logit.

Weights are in fixed point, so sums are the same in any order and thresholds are exact.
"""

import triton
import triton.language as tl

# Weights are at most 1: 2**18 of them sum up to 2**58, and 2**-40 is far below float32's rounding.
ONE: tl.constexpr = tl.constexpr(1099511627776.0)
LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095041)  # of -inf
BIG: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def key_of(b_x):
    """Return an int32 that orders like the float32."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(b_x, largest, inverse):
    """Return exp((x - largest) / temperature); `inverse` is log2(e) / temperature."""
    return tl.exp2((b_x - largest) * inverse)


@triton.jit
def fixed(b_weight, min_p):
    """Return the weight in units of 1 / ONE, 0 below min_p."""
    return tl.where(b_weight >= min_p, (b_weight * ONE).to(tl.int64), 0)


@triton.jit
def measure_above(
    p_list,
    size,
    low,
    middle,
    high,
    largest,
    inverse,
    min_p,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the tokens, or add up the weights, above each of three thresholds; int64."""
    low, middle, high = low.to(tl.int32), middle.to(tl.int32), high.to(tl.int32)
    above_low = tl.zeros([BLOCK], tl.int64)
    above_middle = tl.zeros([BLOCK], tl.int64)
    above_high = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        o_item = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_list + o_item, mask=o_item < size, other=-float("inf"))
        b_key = key_of(b_x)
        if COUNTS:
            b_one = (o_item < size).to(tl.int64)
        else:
            b_one = fixed(weight_of(b_x, largest, inverse), min_p)
        above_low += tl.where(b_key > low, b_one, 0)
        above_middle += tl.where(b_key > middle, b_one, 0)
        above_high += tl.where(b_key > high, b_one, 0)
    return tl.sum(above_low, 0), tl.sum(above_middle, 0), tl.sum(above_high, 0)


@triton.jit
def lowest_with(
    p_list,
    size,
    low,
    high,
    goal,
    largest,
    inverse,
    min_p,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the lowest key in low..high with at most `goal` above it; `high` has at most that."""
    while low < high:
        span = high - low
        first, second, third = low + span // 4, low + span // 2, low + span * 3 // 4
        a, b, c = measure_above(
            p_list, size, first, second, third, largest, inverse, min_p, COUNTS, BLOCK
        )
        new_high = tl.where(a <= goal, first, tl.where(b <= goal, second, third))
        new_low = tl.where(b <= goal, first + 1, second + 1)
        low = tl.where(a <= goal, low, tl.where(c <= goal, new_low, third + 1))
        high = tl.where((a <= goal) | (c <= goal), new_high, high)
    return high


@triton.jit
def measure_at(p_list, size, key, largest, inverse, min_p, BLOCK: tl.constexpr):
    """Return tokens and weight above a key, and tokens and weight of one token at it; int64."""
    b_count = tl.zeros([BLOCK], tl.int64)
    b_mass = tl.zeros([BLOCK], tl.int64)
    b_ties = tl.zeros([BLOCK], tl.int64)
    b_tie = tl.zeros([BLOCK], tl.int64)
    key = key.to(tl.int32)
    for start in range(0, size, BLOCK):
        o_item = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_list + o_item, mask=o_item < size, other=-float("inf"))
        b_key = key_of(b_x)
        b_fixed = fixed(weight_of(b_x, largest, inverse), min_p)
        b_count += (b_key > key).to(tl.int64)
        b_mass += tl.where(b_key > key, b_fixed, 0)
        b_equal = (b_key == key) & (o_item < size)
        b_ties += b_equal.to(tl.int64)
        b_tie = tl.maximum(b_tie, tl.where(b_equal, b_fixed, 0))
    return tl.sum(b_count, 0), tl.sum(b_mass, 0), tl.sum(b_ties, 0), tl.max(b_tie, 0)


@triton.jit
def place_of_tie(p_list, size, key, number, BLOCK: tl.constexpr):
    """Return the place of the token with this key that has `number` of the same key before it."""
    key = key.to(tl.int32)
    place = (number * 0 + BIG).to(tl.int32)
    before = number * 0
    for start in range(0, size, BLOCK):
        o_item = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_list + o_item, mask=o_item < size, other=-float("inf"))
        b_equal = (key_of(b_x) == key) & (o_item < size)
        b_rank = before + tl.cumsum(b_equal.to(tl.int64), 0) - 1
        found = tl.min(tl.where(b_equal & (b_rank == number), o_item, BIG), 0)
        place = tl.minimum(place, found)
        before += tl.sum(b_equal.to(tl.int64), 0)
    return place


@triton.jit
def draw_by_rank(
    p_list, size, total, uniform, top_k, top_p, min_p, largest, inverse, BLOCK: tl.constexpr
):
    """Return the place of the drawn token; the list holds all that top-k and top-p keep."""
    high = tl.max(key_of(tl.full([16], 0.0, tl.float32) + largest), 0).to(tl.int64)
    low = high * 0 + LOWEST_KEY
    ties = low * 0 + BIG  # how many tokens at the lowest kept key are kept
    if (top_k > 0) & (top_k < size):
        low = lowest_with(p_list, size, low, high, top_k - 1, largest, inverse, 0.0, True, BLOCK)
        count, mass, _, tie = measure_at(p_list, size, low, largest, inverse, 0.0, BLOCK)
        ties = top_k - count
        total = mass + ties * tie
    if top_p < 1.0:
        # A token is kept if less than this precedes it; the first one always is.
        allowed = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        allowed = tl.maximum(tl.minimum(allowed, total), 1)
        cut = lowest_with(p_list, size, low, high, allowed - 1, largest, inverse, 0.0, False, BLOCK)
        _, mass, _, tie = measure_at(p_list, size, cut, largest, inverse, 0.0, BLOCK)
        needed = (allowed - mass + tl.maximum(tie, 1) - 1) // tl.maximum(tie, 1)
        ties = tl.where(cut == low, tl.minimum(ties, needed), needed)
        low = cut
    _, mass, equal, tie = measure_at(p_list, size, low, largest, inverse, min_p, BLOCK)
    total = mass + tl.minimum(ties, equal) * tie
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    key = lowest_with(p_list, size, low, high, target, largest, inverse, min_p, False, BLOCK)
    _, mass, equal, tie = measure_at(p_list, size, key, largest, inverse, min_p, BLOCK)
    number = tl.minimum((target - mass) // tl.maximum(tie, 1), equal - 1)
    return place_of_tie(p_list, size, key, number, BLOCK)
