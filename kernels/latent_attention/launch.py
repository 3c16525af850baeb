"""Launches latent attention: checks, the grid, room for partial results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.launch import (
    LOG2_E,
    decode_spans,
    programs_at_once,
    unsupported,
)
from appliance.kernels.attention.variant import COMPUTE_NAMES, Phase, padded
from appliance.kernels.attention.work import TILE_ROWS, AttentionWork
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.residency import Footprints
from appliance.kernels.gpu.target import Target, target_of
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.kernels.latent_attention.kernel import (
    latent_decode_kernel,
    latent_merge_kernel,
    latent_prefill_kernel,
    scale_queries_kernel,
)
from appliance.kernels.latent_attention.variant import (
    MERGE_WARPS,
    SCALE_WARPS,
    WIDEST_FLOAT32,
    LatentVariant,
)

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache

WIDEST = 512, 64  # elements of a latent, and of a key's rotary part
FORMATS = tuple(form for form in KVFormat if form.has_elements)
_FOOTPRINTS = Footprints(latent_decode_kernel)
_launch_scale_queries = Launcher(scale_queries_kernel)
_launch_latent_decode = Launcher(latent_decode_kernel)
_launch_latent_merge = Launcher(latent_merge_kernel)
_launch_latent_prefill = Launcher(latent_prefill_kernel)


def latent_attention(
    query: Tensor, cache: AnyLayerCache, work: object, *, scale: float, latent: int
) -> Tensor:
    """Attend from every row to its own sequence's latents; see `reference.latent_attention`.

    Both matrix products use the dtype of the query and sum in float32. Launches follow from shapes
    alone, so a captured graph serves other lengths.

    Args:
        query: (num_tokens, num_heads, width) bfloat16, float16 or float32.
        cache: pages of this layer, with this step's tokens written.
        work: the AttentionWork from `attention.launch.plan_attention`.
        scale: multiplies q . k.
        latent: elements of a token that are summed.

    Returns:
        (num_tokens, num_heads, latent), dtype of query.

    Raises:
        UnsupportedModelError: no kernel covers the shape, the dtype or the format.
    """
    assert isinstance(work, AttentionWork)
    assert isinstance(cache, KVPages)
    assert scale > 0, scale
    assert cache.in_rows, "latents lie side by side"
    num_tokens, num_heads, width = query.shape
    assert width == 2 * cache.head_dim, (width, cache.head_dim)
    check_latents(latent, width - latent, cache.block_size, query.dtype, cache.format)
    query = query.contiguous()
    output = query.new_empty(num_tokens, num_heads, latent)
    batch, device = work.batch, query.device
    target = target_of(device)
    variant = LatentVariant(cache.format, query.dtype, num_heads, latent, width - latent)
    is_codes = cache.format.is_quantized
    undo = None
    if is_codes:
        query, undo = _scaled(query, variant.compute_dtype)
    stored = (cache.pages, cache.elements) if is_codes else (cache.elements, None)
    geometry = batch.query_start, batch.context_lens
    tables = batch.block_tables, batch.block_tables.stride(0)
    with device_of(query):
        if batch.num_decodes:
            block_m, fixed = _configured(variant, Phase.DECODE, target)
            spans = decode_spans(work, None)
            most = len(spans.table) // batch.num_decodes
            rows = batch.decode_rows * num_heads
            tiles = -(-rows // block_m)
            partial = query.new_empty((len(spans.table) * rows, latent), dtype=torch.float32)
            partial_lse = query.new_empty(len(partial), dtype=torch.float32)
            arguments = (
                partial,
                partial_lse,
                query,
                undo,
                *stored,
                spans.table,
                spans.count,
                *geometry,
                *tables,
                num_heads,
                batch.decode_rows,
                most,
                tiles,
                scale * LOG2_E,
            )
            at_once = programs_at_once(_FOOTPRINTS, device, arguments, fixed)
            _launch_latent_decode((min(len(spans.table) * tiles, at_once),), arguments, fixed)
            _launch_latent_merge(
                (batch.num_decodes, -(-rows // variant.merged_rows)),
                (
                    output,
                    partial,
                    partial_lse,
                    *geometry,
                    num_heads,
                    batch.decode_rows,
                    most,
                    batch.block_tables.shape[1] * PAGE_TOKENS,
                ),
                {**variant.merge_constexprs, "num_warps": MERGE_WARPS},
            )
        if len(work.tiles):
            block_m, fixed = _configured(variant, Phase.PREFILL, target)
            _launch_latent_prefill(
                (len(work.tiles), TILE_ROWS * num_heads // block_m),
                (
                    output,
                    query,
                    undo,
                    *stored,
                    work.tiles,
                    *geometry,
                    *tables,
                    num_heads,
                    scale * LOG2_E,
                ),
                fixed,
            )
    return output


def _scaled(query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries (num_tokens, num_heads, width) as large as float16 holds, and the inverses.

    The inverses are (num_tokens * num_heads,) float32, powers of two.
    """
    rows, width = query.flatten(0, 1), query.shape[-1]
    scaled = torch.empty_like(query, dtype=dtype)
    undo = query.new_empty(len(rows), dtype=torch.float32)
    with device_of(query):
        _launch_scale_queries(
            (len(rows),),
            (scaled, undo, rows),
            {"WIDTH": width, "WIDTH_PADDED": padded(width), "num_warps": SCALE_WARPS},
        )
    return scaled, undo


def _configured(
    variant: LatentVariant, phase: Phase, target: Target
) -> tuple[int, dict[str, object]]:
    """Return a tile's rows and a kernel's options."""
    tile = variant.tile(phase, target.capability)
    fixed = variant.constexprs(phase, tile, is_interpreted=target.is_interpreted)
    return tile.block_m, fixed | tile.options


def check_latents(
    latent: int,
    rotary: int,
    block_size: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    layer: int | None = None,
) -> None:
    """Raise UnsupportedModelError, with the layer and what is supported, if no kernel covers it."""
    is_float32 = dtype is torch.float32 or kv_format is KVFormat.FP32
    if latent > WIDEST[0] or rotary > WIDEST[1]:
        what = f"latents of {latent} elements beside {rotary} that rotate"
        supported = f"up to {WIDEST[0]} beside {WIDEST[1]}"
    elif block_size != PAGE_TOKENS:
        what, supported = f"block size {block_size}", str(PAGE_TOKENS)
    elif kv_format not in FORMATS:
        what = f"KV blocks of {kv_format.value}"
        supported = ", ".join(form.value for form in FORMATS)
    elif dtype not in COMPUTE_NAMES:
        what, supported = f"activation dtype {dtype}", ", ".join(map(str, COMPUTE_NAMES))
    elif is_float32 and latent > WIDEST_FLOAT32:
        what = f"activation dtype {dtype}, KV blocks of {kv_format.value} and latents of {latent}"
        supported = "bfloat16 and float16, KV blocks of 16 bits"
    else:
        return
    raise unsupported("latent attention", what, supported, layer)
