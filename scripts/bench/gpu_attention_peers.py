"""Other people's attention, over keys and values of the same size in bf16."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from gpu_attention import Problem
    from gpu_timing import Bench, Call

WORKSPACE = 256 << 20


def sdpa_calls(bench: Bench, problem: Problem) -> list[Call]:
    """Torch's fused attention over contiguous keys: what paging is measured against."""
    heads = problem.heads
    kv = (problem.batch, heads.num_kv_heads, problem.context, heads.head_dim)
    nbytes = 4 * problem.batch * heads.num_kv_heads * problem.context * heads.head_dim
    query = problem.query().view(problem.batch, problem.rows, heads.num_heads, -1).transpose(1, 2)
    causal = problem.rows == problem.context
    mask = None
    if not causal and problem.rows > 1:
        last = torch.arange(problem.context - problem.rows, problem.context, device=bench.device)
        mask = torch.arange(problem.context, device=bench.device) <= last.unsqueeze(1)
    calls: list[Call] = []
    for _ in range(bench.copies(nbytes)):
        key, value = (torch.randn(kv, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        calls.append(
            partial(
                functional.scaled_dot_product_attention,
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=True,
            )
        )
    return calls


def flashinfer_calls(bench: Bench, problem: Problem) -> list[Call]:
    """FlashInfer's paged kernels, planned before the time is taken."""
    import flashinfer

    heads, page = problem.heads, 32
    pages = problem.batch * problem.blocks
    nbytes = 4 * pages * page * heads.num_kv_heads * heads.head_dim
    copies = bench.copies(nbytes)
    shape = (copies * pages, 2, page, heads.num_kv_heads, heads.head_dim)
    cache = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    query = problem.query()
    ends = torch.arange(problem.batch + 1, dtype=torch.int32, device=bench.device)
    last = torch.full((problem.batch,), (problem.context - 1) % page + 1, dtype=torch.int32)
    calls: list[Call] = []
    for copy in range(copies):
        workspace = torch.empty(WORKSPACE // copies, dtype=torch.uint8, device=bench.device)
        order = torch.randperm(pages, dtype=torch.int32, device=bench.device) + copy * pages
        table = (ends * problem.blocks, order, last.to(bench.device))
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, page)
        if problem.rows == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(*table, *sizes, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                ends * problem.rows, *table, *sizes, causal=True, q_data_type=torch.bfloat16
            )
        calls.append(partial(wrapper.run, query, cache))
    return calls
