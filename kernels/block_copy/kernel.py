"""Block moves on the GPU: all blocks of all layers in one launch."""

import triton
import triton.language as tl


@triton.jit
def block_copy_kernel(
    words_ptr,  # any aligned address: the base of all offsets, in words of 4 bytes
    layers_ptr,  # (num_layers, 5) int64: source, its stride, destination, its stride, size
    moves_ptr,  # (num_moves, 2) int64: rows at the source and at the destination
    BLOCK: tl.constexpr,
):
    """Copy BLOCK words per program; all offsets and sizes are multiples of 4 words."""
    p_layer = layers_ptr + tl.program_id(1) * 5
    p_move = moves_ptr + tl.program_id(0) * 2
    source = tl.load(p_layer) + tl.load(p_move) * tl.load(p_layer + 1)
    destination = tl.load(p_layer + 2) + tl.load(p_move + 1) * tl.load(p_layer + 3)
    o_word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_word < tl.multiple_of(tl.load(p_layer + 4), 4)
    p_source = words_ptr + tl.multiple_of(source, 4) + o_word
    p_destination = words_ptr + tl.multiple_of(destination, 4) + o_word
    tl.store(p_destination, tl.load(p_source, mask=b_mask), mask=b_mask)
