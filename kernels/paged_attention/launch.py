"""Launches paged attention: checks what is asked for, chooses a variant, sets up the grid."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.paged_attention.kernel import merge_partials_kernel, paged_attention_kernel
from appliance.kernels.paged_attention.variant import (
    COMPUTE_NAMES,
    Phase,
    Variant,
    choose_tile,
    padded,
)
from appliance.kernels.paged_attention.work import (
    MAX_SPANS,
    TILE_ROWS,
    AttentionWork,
    plan_attention,
)

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.kv_cache import KVBlocks

__all__ = ["AttentionWork", "paged_attention", "plan_attention"]

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16  # even at one byte an element, every head then begins 16-byte aligned
MAX_GROUP = 16
BLOCK_SIZES = (16, 32)
INTERPRETED = 80  # compute capability whose tiles are taken where there is no GPU


def paged_attention(
    query: Tensor,
    cache: KVBlocks,
    work: object,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from every row to its own sequence, causally; see `reference.paged_attention`.

    Both matrix products take the dtype of the query and sum in float32.

    Args:
        query: (num_tokens, num_heads, head_dim) bfloat16, float16 or float32; the heads of a row
            lie side by side.
        cache: blocks of this layer, with this step's keys and values written.
        work: the AttentionWork from `plan_attention`.
        scale: multiplies q . k.
        window: a row sees this many latest positions, its own included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        (num_tokens, num_heads, head_dim), dtype of query.

    Raises:
        UnsupportedModelError: no kernel covers the shape or the dtype.
    """
    assert isinstance(work, AttentionWork)
    assert scale > 0, scale
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = cache.keys.shape
    assert cache.keys.is_contiguous()
    assert cache.values.is_contiguous()
    assert query[0].is_contiguous(), query.stride()
    check_supported(num_heads, num_kv_heads, head_dim, block_size, query.dtype)

    output = query.new_empty(num_tokens, num_heads, head_dim)
    # An empty tensor where no row is split: the kernel takes a pointer either way.
    shape = (work.num_partials, num_heads, head_dim)
    partial = torch.empty(shape, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    batch = work.batch
    for phase, rows in ((Phase.DECODE, work.spans), (Phase.PREFILL, work.tiles)):
        if not len(rows):
            continue
        decode = phase is Phase.DECODE
        variant = Variant(
            phase=phase,
            kv_format=cache.format,
            dtype=query.dtype,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            has_window=window is not None,
            has_softcap=softcap is not None,
        )
        tile = choose_tile(variant, _capability(query.device))
        # A row of the table stands for TILE_ROWS query rows; a program takes what its group leaves.
        parts = 1 if decode else TILE_ROWS * variant.group_padded // tile.block_m
        with torch.cuda.device(query.get_device()):
            paged_attention_kernel[(len(rows), parts, num_kv_heads)](
                output,
                partial if decode else None,
                partial_lse if decode else None,
                query,
                cache.keys,
                cache.values,
                cache.key_scales,
                cache.value_scales,
                rows,
                batch.query_start,
                batch.context_lens,
                batch.block_tables,
                query.stride(0),
                batch.block_tables.stride(0),
                num_kv_heads,
                LOG2_E * (scale if softcap is None else softcap),
                0.0 if softcap is None else 2 * LOG2_E * scale / softcap,
                0 if window is None else window,
                **variant.constexprs(tile),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                maxnreg=tile.max_registers,
            )
    if len(work.merges):
        with torch.cuda.device(query.get_device()):
            merge_partials_kernel[(len(work.merges), num_heads)](
                output,
                partial,
                partial_lse,
                work.merges,
                batch.query_start,
                num_heads,
                HEAD_DIM=head_dim,
                HEAD_DIM_PADDED=padded(head_dim),
                MAX_PARTIALS=MAX_SPANS,
            )
    return output


def check_supported(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Raise UnsupportedModelError, naming what is supported, if no kernel covers this."""
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        what = f"head_dim {head_dim}"
        supported = f"multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    elif num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        what = f"{num_heads} query heads on {num_kv_heads} KV heads"
        supported = f"1 to {MAX_GROUP} query heads for each KV head"
    elif block_size not in BLOCK_SIZES:
        what = f"block size {block_size}"
        supported = ", ".join(map(str, BLOCK_SIZES))
    elif dtype not in COMPUTE_NAMES:
        what = f"activation dtype {dtype}"
        supported = ", ".join(map(str, COMPUTE_NAMES))
    else:
        return
    msg = f"paged attention on the GPU has no kernel for {what}; supported: {supported}"
    raise UnsupportedModelError(msg)


@lru_cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
