"""The Walsh-Hadamard transform of neighbours, in registers."""

import triton
import triton.language as tl


@triton.jit
def hadamard(b_x, SIZE: tl.constexpr):
    """Return the normalized transform of each SIZE neighbours of (rows, columns)."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    for stage in tl.static_range(SIZE.bit_length() - 1):
        b_x = tl.reshape(b_x, (ROWS * COLUMNS // (2 << stage), 2, 1 << stage))
        b_first, b_second = tl.split(tl.permute(b_x, 0, 2, 1))
        b_x = tl.permute(tl.join(b_first + b_second, b_first - b_second), 0, 2, 1)
    return tl.reshape(b_x, (ROWS, COLUMNS)) * (SIZE**-0.5)
