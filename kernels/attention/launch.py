"""Launches paged attention: checks, the choice of a variant, the grid."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.attention.decode_kernel import decode_kernel
from appliance.kernels.attention.fp8_kernel import fp8_prefill_kernel
from appliance.kernels.attention.prefill_kernel import prefill_kernel
from appliance.kernels.attention.spans_kernel import plan_spans_kernel, share_spans_kernel
from appliance.kernels.attention.variant import (
    COMPUTE_NAMES,
    Phase,
    Tile,
    Variant,
    choose_tile,
    padded,
)
from appliance.kernels.attention.work import (
    MAX_KV_HEADS,
    MAX_ROWS,
    SPAN_BOUNDS,
    SPAN_COLUMNS,
    SPAN_LENGTHS,
    TILE_ROWS,
    AttentionWork,
    DecodeSpans,
    most_partials,
    prefill_tiles,
)
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.residency import Footprints, multiprocessors_of
from appliance.kernels.gpu.target import Target, target_of
from appliance.kernels.kv_page.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.rows.ragged import RaggedBatch


__all__ = ["AttentionWork", "check_supported", "paged_attention", "plan_attention"]

LOG2_E = math.log2(math.e)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)
MAX_GROUP = 16
# head_dim in float32, over elements and over codes; more needs more shared memory than most GPUs
# have.
WIDEST_FLOAT32 = 256, 128
INTERPRETED_PROGRAMS = 3  # few, so that each has several spans
_FOOTPRINTS = Footprints(decode_kernel)
_launch_decode = Launcher(decode_kernel)
_launch_prefill = Launcher(prefill_kernel)
_launch_fp8_prefill = Launcher(fp8_prefill_kernel)
_launch_plan = Launcher(plan_spans_kernel)
_launch_share = Launcher(share_spans_kernel)


def plan_attention(
    batch: RaggedBatch, block_size: int, lengths: tuple[int, ...] | None = None
) -> AttentionWork:
    """Lay out one step's work; its sizes follow from the shapes of the batch's tensors alone.

    Args:
        batch: the step. A decode row with context 0 is padding and gets zeros.
        block_size: token slots in a block.
        lengths: of spans, between SPAN_BOUNDS; None takes those that are computed.
    """
    assert block_size == PAGE_TOKENS, block_size
    assert batch.decode_rows <= MAX_ROWS, batch.decode_rows
    device, tiles = batch.query_start.device, batch.prefill_tiles
    if tiles is None and batch.num_seqs > batch.num_decodes:
        host_tiles = prefill_tiles(batch.host_query_lens, batch.num_decodes)
        tiles = torch.from_numpy(host_tiles).to(device, non_blocking=True)
    if tiles is None:  # a captured graph must not copy from the host
        tiles = torch.empty((0, 2), dtype=torch.int32, device=device)
    return AttentionWork(batch, tiles, lengths or SPAN_LENGTHS)


def decode_spans(work: AttentionWork, window: int | None, most_members: int = 1) -> DecodeSpans:
    """Return the spans of decode rows for layers of one window.

    Args:
        work: of the step.
        window: latest positions that a row sees; None is all.
        most_members: sequences that one pass over a span can serve. With a window each has spans of
            its own: few see the same ones whole.
    """
    if window is not None:
        most_members = 1
    if (window, most_members) not in work.spans:
        work.spans[window, most_members] = _cut_spans(work, window, most_members)
    return work.spans[window, most_members]


def _cut_spans(work: AttentionWork, window: int | None, most_members: int) -> DecodeSpans:
    batch = work.batch
    device, decodes = batch.query_start.device, batch.num_decodes
    tokens = batch.block_tables.shape[1] * PAGE_TOKENS
    step = work.num_rows, tokens, batch.decode_rows, window
    num_partials = most_partials(*step, work.lengths)
    most = num_partials // work.num_rows

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    spans = DecodeSpans(
        table=empty(decodes * most, SPAN_COLUMNS),
        count=empty(1),
        ends=empty(decodes, 2),
        most=most,
        num_partials=num_partials,
    )
    lengths = batch.query_start, batch.context_lens
    shared = None
    if most_members > 1:  # a step's number of sequences must not choose another kernel
        shared = empty(decodes)
        most_members = min(most_members, decodes)
    if shared is not None and most_members > 1:
        shared_by = (
            shared,
            *lengths,
            None if batch.sealed is None else batch.sealed.lens,
            batch.block_tables,
            batch.block_tables.stride(0),
            most_members,
        )
        _launch_share((decodes,), shared_by, {"num_warps": 1})
    arguments = (
        spans.table,
        spans.count,
        spans.ends,
        shared,
        *lengths,
        decodes,
        tokens if window is None else window,
        most_members,
        most,
    )
    cut = {"BOUNDS": SPAN_BOUNDS, "LENGTHS": work.lengths, "COLUMNS": SPAN_COLUMNS}
    block = max(32, padded(decodes))
    _launch_plan((decodes,), arguments, {**cut, "BLOCK": block, "num_warps": 1})
    return spans


def paged_attention(
    query: Tensor,
    cache: LayerCache | SealedBlocks,
    work: object,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sees: Tensor | None = None,
) -> Tensor:
    """Attend from every row to its own sequence, causally unless `sees` says more.

    See `reference.paged_attention`.

    Both matrix products use the dtype of the query, or float16 with quantized pages, and sum in
    float32. From compute capability 8.9 on, prefill over FP8 pages multiplies E4M3, unless the
    query is float32 or a head has more than 256 dimensions: each element of a query and each weight
    is rounded to 4 significant bits.

    Args:
        query: (num_tokens, num_heads, head_dim) bfloat16, float16 or float32; the heads of a row
            lie side by side.
        cache: pages of this layer, with this step's keys and values written.
        work: the AttentionWork from `plan_attention`.
        scale: multiplies q . k.
        window: a row sees this many latest positions, its own included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (num_heads,) float32, a score for each head that has no value.
        sees: (num_tokens,) int32, the leading tokens that each row sees; see `RaggedBatch`. Rows
            of sequences that decode see those up to their own, whatever it says.

    Returns:
        (num_tokens, num_heads, head_dim), dtype of query.

    Raises:
        UnsupportedModelError: no kernel covers the shape or the dtype.
    """
    assert isinstance(work, AttentionWork)
    assert isinstance(cache, KVPages | SealedBlocks)
    assert scale > 0, scale
    assert sees is None or (sees.dtype is torch.int32 and sees.is_contiguous()), sees
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = cache.num_kv_heads
    assert head_dim == cache.head_dim, (head_dim, cache.head_dim)
    assert query[0].is_contiguous(), query.stride()
    check_supported(num_heads, num_kv_heads, head_dim, cache.block_size, query.dtype, cache.format)
    output = query.new_empty(num_tokens, num_heads, head_dim)
    batch = work.batch
    if isinstance(cache, SealedBlocks):
        sealed = batch.sealed
        assert sealed is not None
        assert sees is None or sealed.open_tables.stride(0) == 1, "they go on in the next rows"
        pages = cache.closed
        opened: tuple[Tensor | int | None, ...] = (
            pages.halves,
            cache.open.elements,
            sealed.lens,
            sealed.open_tables,
            sealed.open_tables.stride(0),
        )
    else:
        pages, opened = cache, (None, None, None, None, 0)
    stored = (pages.elements, pages.head_scales, *opened, sinks)
    target = target_of(query.device)
    capability = None if target.is_interpreted else target.capability
    after_query = (
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        query.stride(0),
        batch.block_tables.stride(0),
        num_kv_heads,
        LOG2_E * scale if softcap is None else 2 * LOG2_E * scale / softcap,
        0.0 if softcap is None else LOG2_E * softcap,
        0 if window is None else window,
    )

    shape = cache.format, query.dtype, num_heads // num_kv_heads, head_dim
    has = window is not None, softcap is not None, sinks is not None
    with device_of(query):
        if batch.num_decodes:
            variant, tile, fixed = configured((Phase.DECODE, *shape, *has), target)
            tokens = tile.block_m // variant.group  # of a program's rows
            spans = decode_spans(work, window, max(1, tokens // batch.decode_rows))
            tiles = num_kv_heads * -(-batch.decode_rows // tokens)
            if tiles not in spans.arrived:
                counters = (batch.num_decodes, 1 + spans.max_groups, tiles)
                spans.arrived[tiles] = torch.zeros(counters, dtype=torch.int32, device=query.device)
            # Partial results of rows that are split; other rows are written at once.
            room = spans.num_partials * num_heads
            partial = query.new_empty((room, head_dim), dtype=torch.float32)
            partial_lse = query.new_empty(room, dtype=torch.float32)
            arguments = (
                output,
                partial,
                partial_lse,
                spans.arrived[tiles],
                query,
                *stored,
                spans.table,
                spans.count,
                spans.ends,
                batch.decode_rows,
                work.num_rows,
                spans.max_groups,
                *after_query,
            )
            at_once = programs_at_once(_FOOTPRINTS, query.device, arguments, fixed)
            programs = min(len(spans.table) * tiles, at_once)
            _launch_decode((programs,), arguments, fixed)
        if len(work.tiles):
            variant, tile, fixed = configured((Phase.PREFILL, *shape, *has), target)
            # A tile has TILE_ROWS query rows; a program takes as many as its group leaves room for.
            parts = TILE_ROWS * variant.group_padded // tile.block_m
            grid = len(work.tiles), parts, num_kv_heads
            if variant.multiplies_codes(capability):
                codes = pages.pages.view(torch.float8_e4m3fn)
                read = (codes, pages.head_scales, sinks, work.tiles, sees)
                _launch_fp8_prefill(grid, (output, query, *read, *after_query), fixed)
            else:
                arguments = (output, query, *stored, work.tiles, sees, *after_query)
                _launch_prefill(grid, arguments, fixed)
    return output


@cache
def configured(fields: tuple[Any, ...], target: Target) -> tuple[Variant, Tile, dict[str, object]]:
    """Return a variant, from its fields, its tile, and its kernel's options."""
    variant = Variant(*fields)
    tile = choose_tile(variant, target.capability)
    capability = None if target.is_interpreted else target.capability
    return variant, tile, variant.constexprs(tile, capability) | tile.options


def check_supported(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_format: KVFormat = KVFormat.BF16,
    layer: int | None = None,
) -> None:
    """Raise UnsupportedModelError, with the layer and what is supported, if no kernel covers it."""
    is_float32 = dtype is torch.float32 or kv_format is KVFormat.FP32
    if head_dim not in HEAD_DIMS:
        what = f"head_dim {head_dim}"
        supported = ", ".join(map(str, HEAD_DIMS))
    elif num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        what = f"{num_heads} query heads on {num_kv_heads} KV heads"
        supported = f"1 to {MAX_GROUP} query heads for each KV head"
    elif num_kv_heads > MAX_KV_HEADS:
        what = f"{num_kv_heads} KV heads"
        supported = f"up to {MAX_KV_HEADS}"
    elif block_size != PAGE_TOKENS:
        what = f"block size {block_size}"
        supported = str(PAGE_TOKENS)
    elif kv_format is KVFormat.K8V4:
        what = f"KV blocks of {kv_format.value}"
        supported = ", ".join(form.value for form in KVFormat if form is not kv_format)
    elif dtype not in COMPUTE_NAMES:
        what = f"activation dtype {dtype}"
        supported = ", ".join(map(str, COMPUTE_NAMES))
    elif is_float32 and head_dim > WIDEST_FLOAT32[kv_format.is_quantized]:
        what = f"activation dtype {dtype}, KV blocks of {kv_format.value} and head_dim {head_dim}"
        supported = "bfloat16 and float16, or KV blocks that are not quantized"
        if head_dim > max(WIDEST_FLOAT32):
            supported = "bfloat16 and float16, KV blocks of up to 16 bits"
    else:
        return
    raise unsupported("paged attention", what, supported, layer)


def unsupported(
    attention: str, what: str, supported: str, layer: int | None
) -> UnsupportedModelError:
    """Return the error of a kind of attention without a kernel for `what`, in a layer if known."""
    where = "" if layer is None else f"layer {layer}: "
    return UnsupportedModelError(
        f"{where}{attention} on the GPU has no kernel for {what}; supported: {supported}"
    )


def programs_at_once(
    kernels: Footprints,
    device: torch.device,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> int:
    """Return the number of programs of a decode kernel that the device executes at a time."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    program = kernels.of(device, arguments, options)
    card = multiprocessors_of(device, target_of(device).capability)
    return card.num_sms * (card.resident(program) if program else 1)
