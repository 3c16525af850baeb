"""Token masks on the GPU: one program per stretch of a masked row."""

import triton
import triton.language as tl


@triton.jit
def mask_tokens_kernel(
    logits_ptr,  # (num_rows, VOCAB) float32, rows stride apart
    rows_ptr,  # (num_masks,) int64
    words_ptr,  # (num_masks, words_stride) int32
    stride,
    words_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_mask, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + i_mask)
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_in = o_id < VOCAB
    b_word = tl.load(words_ptr + i_mask * words_stride + o_id // 32, mask=b_in, other=0)
    b_banned = ((b_word >> (o_id % 32)) & 1) == 0
    b_value = tl.full((CHUNK,), -float("inf"), tl.float32)
    tl.store(logits_ptr + row * stride + o_id, b_value, mask=b_in & b_banned)
