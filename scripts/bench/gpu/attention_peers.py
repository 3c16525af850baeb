"""Attention of peers, over keys and values of the same size in bf16."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu.attention import Problem
    from bench.gpu.timing import Bench, Call

WORKSPACE = 256 << 20
FLEX_PAGE = 128  # the least that its decode kernel takes; larger pages are to its advantage


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's attention.

    Attributes:
        name: in the results.
        calls: makes the calls of a step.
        captured: whether they can be captured in a graph.
        package: what has to be installed.
    """

    name: str
    calls: Callable[[Bench, Problem], list[Call]]
    captured: bool = True
    package: str = "torch"


def installed(*peers: Peer) -> list[Peer]:
    """Return the peers whose package is installed."""
    return [peer for peer in peers if importlib.util.find_spec(peer.package) is not None]


def sdpa_calls(backend: SDPBackend, bench: Bench, problem: Problem) -> list[Call]:
    """Return calls of torch's SDPA by one backend, over contiguous keys.

    Raises:
        RuntimeError: that backend does not support the step; there is no fallback.
    """
    query, copies = _query(problem), _copies(bench, problem)
    causal = problem.rows == problem.context
    mask: Any = None
    if not causal and problem.rows > 1:
        mask = causal_lower_right(problem.rows, problem.context)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
            )

    calls: list[Call] = []
    for _ in range(copies):
        key, value = _keys_and_values(problem, problem.context)
        if mask is None:
            with sdpa_kernel(backend):
                chosen = torch._fused_sdp_choice(
                    query, key, value, is_causal=causal, enable_gqa=True
                )
            if chosen != backend.value:
                raise RuntimeError(f"{backend.name} does not take this step")
        elif backend is not SDPBackend.FLASH_ATTENTION:
            raise RuntimeError("a mask of the lower right corner is flash attention's only")
        calls.append(partial(attend, key, value))
    return calls


def flex_calls(bench: Bench, problem: Problem) -> list[Call]:
    """Return calls of FlexAttention over shuffled pages, compiled where there is a GPU."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, batch, context = bench.device, problem.batch, problem.context
    per_row = -(-context // FLEX_PAGE)
    num_pages = batch * per_row
    pages = PagedAttention(num_pages, FLEX_PAGE, batch, device=str(device))
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    pages.empty_pages = order.tolist()
    for row in range(batch):
        pages.reserve(torch.tensor(row, device=device), torch.tensor(context, device=device))

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= context - problem.rows + row

    logical = create_block_mask(
        seen, batch, None, problem.rows, context, device=str(device), BLOCK_SIZE=(128, FLEX_PAGE)
    )
    mask = pages.convert_logical_block_mask(logical)
    attend: Any = torch.compile(flex_attention, dynamic=False) if bench.is_gpu else flex_attention
    calls: list[Call] = []
    for _ in range(_copies(bench, problem)):
        key, value = _keys_and_values(problem, num_pages * FLEX_PAGE, batch=1)  # one pool for all
        calls.append(partial(attend, _query(problem), key, value, block_mask=mask, enable_gqa=True))
    return calls


def flashinfer_calls(bench: Bench, problem: Problem) -> list[Call]:
    """Return calls of FlashInfer's paged kernels, planned outside of the measured time."""
    import flashinfer

    heads, page = problem.heads, 32
    pages, copies = problem.batch * problem.blocks, _copies(bench, problem)
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


SDPA = [
    Peer("SDPA flash, contiguous", partial(sdpa_calls, SDPBackend.FLASH_ATTENTION)),
    Peer("SDPA cuDNN, contiguous", partial(sdpa_calls, SDPBackend.CUDNN_ATTENTION)),
]
FLEX = Peer("FlexAttention, paged", flex_calls)
FLASHINFER = Peer("FlashInfer", flashinfer_calls, captured=False, package="flashinfer")


def _copies(bench: Bench, problem: Problem) -> int:
    heads = problem.heads
    return bench.copies(4 * problem.batch * heads.num_kv_heads * problem.context * heads.head_dim)


def _query(problem: Problem) -> Tensor:
    """Return random queries (batch, num_heads, rows, head_dim)."""
    shape = (problem.batch, problem.rows, problem.heads.num_heads, problem.heads.head_dim)
    return problem.query().view(shape).transpose(1, 2)


def _keys_and_values(
    problem: Problem, tokens: int, batch: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return random keys and values, each (batch, num_kv_heads, tokens, head_dim), contiguous."""
    count = problem.batch if batch is None else batch
    shape = (2, count, problem.heads.num_kv_heads, tokens, problem.heads.head_dim)
    key, value = torch.randn(shape, device=problem.device, dtype=torch.bfloat16)
    return key, value
