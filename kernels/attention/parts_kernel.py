"""The products of queries and keys, and of weights and values, for heads whole or in parts.

A wide head has a part of its dimensions for each warp. A warp multiplies queries and keys of its
own dimensions, all add up their scores, and each weights the values of its dimensions. So a warp
holds a part of the queries and of the sums, whose registers are what a wide head lacks, and no key
or value is read twice.
"""

import triton
import triton.language as tl


@triton.jit
def by_part(x, PARTS: tl.constexpr):
    """Return (rows, dims) as (PARTS, rows, dims of a part); as it is with one part."""
    if PARTS == 1:
        return x
    else:
        ROWS: tl.constexpr = x.shape[0]
        DIMS: tl.constexpr = x.shape[1]
        return tl.permute(tl.reshape(x, (ROWS, PARTS, DIMS // PARTS)), 1, 0, 2)


@triton.jit
def whole(x, PARTS: tl.constexpr):
    """Return the reverse of `by_part`."""
    if PARTS == 1:
        return x
    else:
        ROWS: tl.constexpr = x.shape[1]
        DIMS: tl.constexpr = x.shape[2]
        return tl.reshape(tl.permute(x, 1, 0, 2), (ROWS, PARTS * DIMS))


@triton.jit
def query_places(o, PARTS: tl.constexpr):
    """Return the row of 16 and the dimension of each element of queries, as threads read them.

    A whole head is read in the order of a product's operand, 8 neighbours per thread, so it stays
    in the registers that it arrives in. Parts go through shared memory, where Triton's swizzle
    spreads over the banks what differs first among a thread's elements: that must be their row, not
    their part. The bits of a lane's number that count rows lie together: where they do not, Triton
    reduces across warps wrongly.
    """
    if PARTS == 1:
        return o // 256 % 2 * 8 + o // 32 % 8, o // 512 * 32 + o % 32
    else:
        o_dim = o // 1024 * 64 + o // 256 % 2 * 32 + o // 16 % 4 * 8 + o // 64 % 2 * 4 + o % 4
        return o // 128 % 2 * 8 + o // 512 % 2 * 4 + o // 4 % 4, o_dim


@triton.jit
def by_row(x, PARTS: tl.constexpr):
    """Return what was read at `query_places` as (16, dims), each 32 in the order of an operand."""
    DIMS: tl.constexpr = x.shape[0] // 16
    if PARTS == 1:
        x = tl.permute(tl.reshape(x, (DIMS // 32, 2, 8, 4, 2, 4)), 1, 2, 0, 4, 3, 5)
    else:
        x = tl.permute(tl.reshape(x, (DIMS // 64, 2, 2, 2, 2, 4, 4, 4)), 3, 1, 6, 0, 2, 4, 5, 7)
    return tl.reshape(x, (16, DIMS))


@triton.jit
def over_parts(x, PARTS: tl.constexpr):
    """Return the sum of (parts, rows, keys) over the parts.

    Threads get all parts of a few elements, and then all warps the sums. A reduction would leave
    most of it to shuffles.
    """
    ROWS: tl.constexpr = x.shape[1]
    KEYS: tl.constexpr = x.shape[2]
    LEVELS: tl.constexpr = PARTS.bit_length() - 1
    x = tl.permute(x, 1, 2, 0)
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, (ROWS, KEYS, 1 << (LEVELS - 1 - level), 2))
        b_first, b_second = tl.split(x)
        x = b_first + b_second
    return tl.reshape(x, (ROWS, KEYS))


@triton.jit
def score(b_query, b_key, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """Return the products (rows, keys) of queries by part and keys (dims, keys)."""
    if PARTS == 1:
        return tl.dot(b_query, b_key, input_precision=PRECISION)
    else:
        DIMS: tl.constexpr = b_key.shape[0]
        KEYS: tl.constexpr = b_key.shape[1]
        b_key = tl.reshape(b_key, (PARTS, DIMS // PARTS, KEYS))
        return over_parts(tl.dot(b_query, b_key, input_precision=PRECISION), PARTS)


@triton.jit
def decayed(b_acc, b_decay, PARTS: tl.constexpr):
    """Return sums of values by part, each row multiplied by its factor."""
    if PARTS == 1:
        return b_acc * b_decay[:, None]
    else:
        return b_acc * b_decay[None, :, None]


@triton.jit
def add_values(b_acc, b_weight, b_value, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """Return the sums by part plus values (keys, dims), weighted by (rows, keys)."""
    if PARTS == 1:
        return tl.dot(b_weight, b_value, b_acc, input_precision=PRECISION)
    else:
        ROWS: tl.constexpr = b_weight.shape[0]
        KEYS: tl.constexpr = b_weight.shape[1]
        b_weight = tl.broadcast_to(b_weight[None, :, :], (PARTS, ROWS, KEYS))
        return tl.dot(b_weight, by_part(b_value, PARTS), b_acc, input_precision=PRECISION)
