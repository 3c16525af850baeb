"""Routing on the GPU: chooses the experts of some rows, and sorts the pairs if it has all rows.

A program that chooses holds the scores of its rows in registers, an element for each expert. Groups
of experts are padded to a power of two; places rise with the numbers of experts. Scores are
compared as integers that order like them: among equals the lowest number comes first, and NaN
before all, as `torch.topk` has it on a GPU.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.merge_kernel import last_to_arrive
from appliance.kernels.grouped_matmul.kernel import NOBODY

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_KEY: tl.constexpr = tl.constexpr(-2147483648)  # of no expert, and of one that is chosen already
LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095041)  # of -inf
NAN_KEY: tl.constexpr = tl.constexpr(2147483647)
FILL: tl.constexpr = tl.constexpr(1024)


@triton.jit
def multiply_rows(
    logits_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    num_outputs,
    width,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply ROWS rows by one row of the router's weight, in float32."""
    i_output = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b_read = tl.minimum(o_row, num_rows - 1).to(tl.int64)  # the last row stands in for none
    b_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        o_column = start + tl.arange(0, BLOCK)
        b_mask = o_column < width
        p_weight = weight_ptr + i_output.to(tl.int64) * width + o_column
        b_weight = tl.load(p_weight, mask=b_mask, other=0.0)
        p_x = x_ptr + b_read[:, None] * x_stride + o_column[None, :]
        b_x = tl.load(p_x, mask=b_mask[None, :], other=0.0)
        b_sum += b_x.to(tl.float32) * b_weight[None, :]
    b_logit = tl.sum(b_sum, 1)
    if bias_ptr is not None:
        b_logit += tl.load(bias_ptr + i_output)
    b_at = o_row.to(tl.int64) * num_outputs + i_output
    # To L2, where the program that routes reads them.
    tl.store(logits_ptr + b_at, b_logit, mask=o_row < num_rows, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_rows"])
def logits_kernel(
    logits_ptr,  # (num_rows, num_outputs) float32
    x_ptr,  # (num_rows, width), rows x_stride apart
    weight_ptr,  # (num_outputs, width) float32
    bias_ptr,  # (num_outputs,) float32, or None
    num_rows,
    num_outputs,
    width,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply ROWS rows by one row of the router's weight, in float32."""
    multiply_rows(
        logits_ptr, x_ptr, weight_ptr, bias_ptr, num_rows, num_outputs, width, x_stride, ROWS, BLOCK
    )


@triton.jit
def key_of(b_x):
    """Return an int32 that orders like the float32."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0
    return tl.where(b_x == b_x, b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def value_of(b_key):
    """Return the float32 of a key."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def route_rows(
    i_program,  # takes ROWS rows
    ids_ptr,  # (num_rows, TOP_K + SHARED) int64, from 0 on for the first expert that is here
    weights_ptr,  # the same, float32
    counts_ptr,  # (programs, NUM_HERE + SHARED) int32, the pairs of each expert, or None
    pairs_ptr,  # as `sort_kernel` writes them, by the only program; or None
    experts_ptr,
    logits_ptr,  # (num_rows, NUM_EXPERTS) float32, rows stride apart
    bias_ptr,  # (NUM_EXPERTS,) float32, of the choice alone; or None
    scale_ptr,  # (NUM_EXPERTS,) float32, or None
    gate_ptr,  # logit of each row's weight of the shared experts, stride apart; None: it is 1
    num_rows,
    num_blocks,  # of pairs
    stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,  # the value of a Scoring
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    FIRST: tl.constexpr,  # of the experts that are here
    NUM_HERE: tl.constexpr,
    SHARED: tl.constexpr,  # experts of every row, behind those that are here
    BLOCK_M: tl.constexpr,  # pairs of a block
    ROWS: tl.constexpr,  # powers of two from here on
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,  # at least TOP_K
):
    """Choose the experts of ROWS rows as `reference.route` does."""
    PLACES: tl.constexpr = GROUPS * GROUP
    OF_GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    o_row = i_program * ROWS + tl.arange(0, ROWS)
    o_place = tl.arange(0, PLACES)
    o_expert = o_place // GROUP * OF_GROUP + o_place % GROUP
    b_is_expert = (o_place % GROUP < OF_GROUP) & (o_place // GROUP < NUM_GROUPS)
    b_read = tl.minimum(o_row, num_rows - 1).to(tl.int64)  # the last row stands in for none
    p_logit = logits_ptr + b_read[:, None] * stride + o_expert[None, :]
    b_score = tl.load(p_logit, mask=b_is_expert[None, :], other=-float("inf"), cache_modifier=".cg")
    if SCORING == "softmax":
        b_score = tl.exp2((b_score - tl.max(b_score, 1)[:, None]) * LOG2_E)
        b_score = b_score / tl.sum(b_score, 1)[:, None]
    elif SCORING == "sigmoid":
        b_score = 1.0 / (1.0 + tl.exp2(-b_score * LOG2_E))
    b_choice = b_score
    if bias_ptr is not None:
        b_choice += tl.load(bias_ptr + o_expert, mask=b_is_expert, other=0.0)[None, :]
    b_key = tl.where(b_is_expert[None, :], key_of(b_choice), NO_KEY)
    if NUM_GROUPS > 1:
        b_key = in_best_groups(b_key, NUM_GROUPS, TOP_GROUPS, BEST_OF_GROUP, ROWS, GROUPS, GROUP)
    o_slot = tl.arange(0, SLOTS)
    b_slot = tl.full((ROWS, PLACES), -1, tl.int32)  # in which a place was chosen
    b_id = tl.zeros((ROWS, SLOTS), tl.int32)
    b_weight = tl.full((ROWS, SLOTS), -float("inf"), tl.float32)
    for i_slot in range(TOP_K):
        b_best, b_place = tl.max(b_key, 1, return_indices=True)
        b_taken = o_place[None, :] == b_place[:, None]
        b_now = (o_slot == i_slot)[None, :]
        if bias_ptr is None:
            b_taken_score = value_of(b_best)
        else:
            b_taken_score = tl.sum(tl.where(b_taken, b_score, 0.0), 1)
        b_expert = b_place // GROUP * OF_GROUP + b_place % GROUP
        b_id = tl.where(b_now, b_expert[:, None], b_id)
        b_weight = tl.where(b_now, b_taken_score[:, None], b_weight)
        b_slot = tl.where(b_taken, i_slot, b_slot)
        b_key = tl.where(b_taken, NO_KEY, b_key)
    b_is_slot = (o_slot < TOP_K)[None, :]
    if SCORING == "softmax of chosen":
        b_weight = tl.exp2((b_weight - tl.max(b_weight, 1)[:, None]) * LOG2_E)
        b_weight = b_weight / tl.sum(b_weight, 1)[:, None]
    if RENORMALIZE:
        b_total = tl.sum(tl.where(b_is_slot, b_weight, 0.0), 1)
        b_weight = b_weight / (b_total + EPSILON)[:, None]
    b_weight *= SCALE
    if scale_ptr is not None:
        b_weight *= tl.load(scale_ptr + b_id)
    PAIRS: tl.constexpr = TOP_K + SHARED  # of a row
    b_at = o_row.to(tl.int64)[:, None] * PAIRS + o_slot[None, :]
    b_stored = (o_row < num_rows)[:, None] & b_is_slot
    tl.store(ids_ptr + b_at, b_id.to(tl.int64) - FIRST, mask=b_stored)
    tl.store(weights_ptr + b_at, b_weight, mask=b_stored)
    if SHARED:
        b_share = tl.full((ROWS,), 1.0, tl.float32)
        if gate_ptr is not None:
            b_gate = tl.load(gate_ptr + b_read * stride, cache_modifier=".cg")
            b_share = 1.0 / (1.0 + tl.exp2(-b_gate * LOG2_E))
        for i in tl.static_range(SHARED):
            b_last = o_row.to(tl.int64) * PAIRS + (TOP_K + i)
            tl.store(
                ids_ptr + b_last, o_row.to(tl.int64) * 0 + (NUM_HERE + i), mask=o_row < num_rows
            )
            tl.store(weights_ptr + b_last, b_share, mask=o_row < num_rows)
    o_here = o_expert - FIRST
    b_is_here = b_is_expert & (o_here >= 0) & (o_here < NUM_HERE)
    b_member = (b_slot >= 0) & (o_row < num_rows)[:, None] & b_is_here[None, :]
    b_count = tl.sum(b_member.to(tl.int32), 0)
    if counts_ptr is not None:
        p_count = counts_ptr + i_program * (NUM_HERE + SHARED)
        tl.store(p_count + o_here, b_count, mask=b_is_here)
        for i in tl.static_range(SHARED):
            tl.store(p_count + NUM_HERE + i, tl.sum((o_row < num_rows).to(tl.int32), 0))
    if pairs_ptr is not None:
        for start in tl.range(0, num_blocks * BLOCK_M, FILL, num_stages=1):
            o_pair = start + tl.arange(0, FILL)
            tl.store(pairs_ptr + o_pair, o_pair * 0 + NOBODY, mask=o_pair < num_blocks * BLOCK_M)
        for start in tl.range(0, num_blocks, FILL, num_stages=1):
            o_block = start + tl.arange(0, FILL)
            tl.store(experts_ptr + o_block, o_block * 0 + NOBODY, mask=o_block < num_blocks)
        tl.debug_barrier()  # all of that is written before it is written over
        b_blocks = (b_count + BLOCK_M - 1) // BLOCK_M
        b_block = tl.cumsum(b_blocks, 0) - b_blocks
        b_rank = tl.cumsum(b_member.to(tl.int32), 0) - 1
        p_pair = pairs_ptr + (b_block * BLOCK_M)[None, :] + b_rank
        tl.store(p_pair, o_row[:, None] * PAIRS + b_slot, mask=b_member)
        for i in range((ROWS + BLOCK_M - 1) // BLOCK_M):
            tl.store(experts_ptr + b_block + i, o_here, mask=i < b_blocks)
        blocks = (num_rows + BLOCK_M - 1) // BLOCK_M  # of each shared expert
        for i in tl.static_range(SHARED):
            i_first = tl.sum(b_blocks, 0) + i * blocks
            b_mine = o_row * PAIRS + (TOP_K + i)
            tl.store(pairs_ptr + i_first * BLOCK_M + o_row, b_mine, mask=o_row < num_rows)
            o_block = tl.arange(0, ROWS)
            p_expert = experts_ptr + i_first + o_block
            tl.store(p_expert, o_block * 0 + (NUM_HERE + i), mask=o_block < blocks)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def route_kernel(
    ids_ptr,  # (num_rows, TOP_K + SHARED) int64, from 0 on for the first expert that is here
    weights_ptr,  # the same, float32
    counts_ptr,  # (programs, NUM_HERE + SHARED) int32, the pairs of each expert, or None
    pairs_ptr,  # as `sort_kernel` writes them, by the only program; or None
    experts_ptr,
    logits_ptr,  # (num_rows, NUM_EXPERTS) float32, rows stride apart
    bias_ptr,  # (NUM_EXPERTS,) float32, of the choice alone; or None
    scale_ptr,  # (NUM_EXPERTS,) float32, or None
    gate_ptr,  # logit of each row's weight of the shared experts, stride apart; None: it is 1
    num_rows,
    num_blocks,  # of pairs
    stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,  # the value of a Scoring
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    FIRST: tl.constexpr,  # of the experts that are here
    NUM_HERE: tl.constexpr,
    SHARED: tl.constexpr,  # experts of every row, behind those that are here
    BLOCK_M: tl.constexpr,  # pairs of a block
    ROWS: tl.constexpr,  # powers of two from here on
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,  # at least TOP_K
):
    """Choose the experts of ROWS rows as `reference.route` does."""
    route_rows(
        tl.program_id(0),
        ids_ptr,
        weights_ptr,
        counts_ptr,
        pairs_ptr,
        experts_ptr,
        logits_ptr,
        bias_ptr,
        scale_ptr,
        gate_ptr,
        num_rows,
        num_blocks,
        stride,
        NUM_EXPERTS,
        TOP_K,
        SCORING,
        RENORMALIZE,
        EPSILON,
        SCALE,
        NUM_GROUPS,
        TOP_GROUPS,
        BEST_OF_GROUP,
        FIRST,
        NUM_HERE,
        SHARED,
        BLOCK_M,
        ROWS,
        GROUPS,
        GROUP,
        SLOTS,
    )


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def choose_kernel(
    ids_ptr,  # (num_rows, TOP_K + SHARED) int64, from 0 on for the first expert that is here
    weights_ptr,  # the same, float32
    counts_ptr,  # (programs, NUM_HERE + SHARED) int32, the pairs of each expert, or None
    pairs_ptr,  # as `sort_kernel` writes them, by the only program; or None
    experts_ptr,
    logits_ptr,  # (num_rows, stride) float32, which this writes first
    bias_ptr,  # (NUM_EXPERTS,) float32, of the choice alone; or None
    scale_ptr,  # (NUM_EXPERTS,) float32, or None
    gate_ptr,  # logit of each row's weight of the shared experts, stride apart; None: it is 1
    x_ptr,  # as in `logits_kernel`
    weight_ptr,
    logit_bias_ptr,
    arrived_ptr,  # (1,) int32, zero before and after
    num_rows,
    num_blocks,  # of pairs
    stride,  # outputs: experts, and the gate if there is one
    width,
    x_stride,
    MULTIPLIED: tl.constexpr,  # rows that a program multiplies
    BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,  # the value of a Scoring
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    FIRST: tl.constexpr,  # of the experts that are here
    NUM_HERE: tl.constexpr,
    SHARED: tl.constexpr,  # experts of every row, behind those that are here
    BLOCK_M: tl.constexpr,  # pairs of a block
    ROWS: tl.constexpr,  # powers of two from here on
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,  # at least TOP_K
):
    """Multiply by the router's weight; the program that ends last chooses for all rows."""
    multiply_rows(
        logits_ptr, x_ptr, weight_ptr, logit_bias_ptr, num_rows, stride, width, x_stride,
        MULTIPLIED, BLOCK,
    )  # fmt: skip
    if last_to_arrive(arrived_ptr, tl.num_programs(0) * tl.num_programs(1)):
        route_rows(
            0,
            ids_ptr,
            weights_ptr,
            counts_ptr,
            pairs_ptr,
            experts_ptr,
            logits_ptr,
            bias_ptr,
            scale_ptr,
            gate_ptr,
            num_rows,
            num_blocks,
            stride,
            NUM_EXPERTS,
            TOP_K,
            SCORING,
            RENORMALIZE,
            EPSILON,
            SCALE,
            NUM_GROUPS,
            TOP_GROUPS,
            BEST_OF_GROUP,
            FIRST,
            NUM_HERE,
            SHARED,
            BLOCK_M,
            ROWS,
            GROUPS,
            GROUP,
            SLOTS,
        )


@triton.jit
def in_best_groups(
    b_key,  # (ROWS, GROUPS * GROUP)
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the keys, that of -inf for experts outside the best groups."""
    b_grouped = tl.reshape(b_key, (ROWS, GROUPS, GROUP))
    b_best, b_place = tl.max(b_grouped, 2, return_indices=True)
    b_worth = value_of(b_best)
    if BEST_OF_GROUP == 2:
        b_is_best = tl.arange(0, GROUP)[None, None, :] == b_place[:, :, None]
        b_worth += value_of(tl.max(tl.where(b_is_best, NO_KEY, b_grouped), 2))
    o_group = tl.arange(0, GROUPS)[None, :]
    b_left = tl.where(o_group < NUM_GROUPS, key_of(b_worth), NO_KEY)
    b_kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in range(TOP_GROUPS):
        _, b_group = tl.max(b_left, 1, return_indices=True)
        b_taken = o_group == b_group[:, None]
        b_kept = tl.where(b_taken, 1, b_kept)
        b_left = tl.where(b_taken, NO_KEY, b_left)
    b_grouped = tl.where((b_kept[:, :, None] > 0) | (b_grouped == NO_KEY), b_grouped, LOWEST_KEY)
    return tl.reshape(b_grouped, (ROWS, GROUPS * GROUP))
