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
from appliance.kernels.attention.variant import COMPUTE_NAMES, Phase
from appliance.kernels.attention.work import TILE_ROWS, AttentionWork
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.residency import Footprints
from appliance.kernels.gpu.target import Target, target_of
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.kernels.latent_attention.kernel import (
    latent_decode_kernel,
    latent_prefill_kernel,
)
from appliance.kernels.latent_attention.step_kernel import (
    latent_values_kernel,
    map_queries_kernel,
    write_latents_kernel,
)
from appliance.kernels.latent_attention.variant import (
    VALUE_ROWS,
    WIDEST_FLOAT32,
    LatentVariant,
)

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.norm_rope.weights import NormWeights

WIDEST = 512, 64  # elements of a latent, and of a key's rotary part
FORMATS = tuple(form for form in KVFormat if form.has_elements)
_FOOTPRINTS = Footprints(latent_decode_kernel)
_launch_write = Launcher(write_latents_kernel)
_launch_map = Launcher(map_queries_kernel)
_launch_latent_decode = Launcher(latent_decode_kernel)
_launch_latent_values = Launcher(latent_values_kernel)
_launch_latent_prefill = Launcher(latent_prefill_kernel)


def write_latents(
    found: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: AnyLayerCache,
    slot_mapping: Tensor,
    norm: NormWeights,
    query_norm: NormWeights | None = None,
) -> Tensor | None:
    """See `reference.write_latents_with`; one launch. Rows of `found` may lie apart."""
    assert isinstance(cache, KVPages)
    assert cache.in_rows, "latents lie side by side"
    num_tokens, latent, rotary = len(found), len(norm.weight), 2 * cos.shape[1]
    assert latent + rotary == 2 * cache.head_dim, (latent, rotary, cache.head_dim)
    assert found.stride(1) == 1, found.stride()
    rank = found.shape[1] - latent - rotary
    queries = None if query_norm is None else found.new_empty(num_tokens, rank)
    if not num_tokens:
        return queries
    is_codes = cache.format.is_quantized
    arguments = (
        queries,
        cache.pages if is_codes else cache.elements,
        cache.halves if is_codes else None,
        found,
        norm.weight,
        None if query_norm is None else query_norm.weight,
        cos.contiguous(),
        sin.contiguous(),
        slot_mapping,
        rank,
        found.stride(0),
        norm.eps,
        0.0 if query_norm is None else query_norm.eps,
    )
    variant = LatentVariant(cache.format, found.dtype, 1, latent, rotary)
    fixed = variant.write_constexprs(0 if query_norm is None else rank)
    with device_of(found):
        _launch_write((num_tokens, 1 if query_norm is None else 2), arguments, fixed)
    return queries


def latent_attention(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: AnyLayerCache,
    work: object,
    *,
    keys: Tensor,
    values: Tensor,
    scale: float,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Attend from every row's heads to its own sequence's latents.

    Products use the dtype of the query and sum in float32. Launches follow from shapes alone, so a
    captured graph serves other lengths. See `reference.latent_attention_with` for the arguments.

    Args:
        query: bfloat16, float16 or float32; rows may lie apart.
        cache: pages of this layer, with this step's tokens written.
        work: the AttentionWork from `attention.launch.plan_attention`.
        keys: dtype of query, contiguous; likewise values.

    Raises:
        UnsupportedModelError: no kernel covers the shape, the dtype or the format.
    """
    assert isinstance(work, AttentionWork)
    assert isinstance(cache, KVPages)
    assert scale > 0, scale
    assert cache.in_rows, "latents lie side by side"
    num_tokens, num_heads, _ = query.shape
    latent, rotary, value = keys.shape[2], 2 * cos.shape[1], values.shape[1]
    assert latent + rotary == 2 * cache.head_dim, (latent, rotary, cache.head_dim)
    check_latents(latent, rotary, cache.block_size, query.dtype, cache.format)
    variant = LatentVariant(cache.format, query.dtype, num_heads, latent, rotary)
    output = query.new_empty(num_tokens, num_heads, value)
    if not num_tokens:
        return output
    batch, device = work.batch, query.device
    target = target_of(device)
    is_codes = cache.format.is_quantized
    stored = (cache.pages, cache.elements) if is_codes else (cache.elements, None)
    geometry = batch.query_start, batch.context_lens
    tables = batch.block_tables, batch.block_tables.stride(0)
    with device_of(query):
        query, undo = _mapped(variant, query, keys, (cos, sin), query_scale)
        if len(work.tiles):
            block_m, fixed = _configured(variant, Phase.PREFILL, target)
            attended = query.new_empty((num_tokens, num_heads, latent), dtype=output.dtype)
            _launch_latent_prefill(
                (len(work.tiles), TILE_ROWS * num_heads // block_m),
                (
                    attended,
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
            # Of rows that are decoded this maps nothing; they are written below.
            output = torch.einsum("nhl,hvl->nhv", attended, values).contiguous()
        if batch.num_decodes:
            block_m, fixed = _configured(variant, Phase.DECODE, target)
            spans = decode_spans(work, None)
            tiles = -(-batch.decode_rows * num_heads // block_m)
            room = spans.num_partials * num_heads
            partial = query.new_empty((room, latent), dtype=torch.float32)
            partial_lse = query.new_empty(room, dtype=torch.float32)
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
                work.num_rows,
                tiles,
                scale * LOG2_E,
            )
            at_once = programs_at_once(_FOOTPRINTS, device, arguments, fixed)
            _launch_latent_decode((min(len(spans.table) * tiles, at_once),), arguments, fixed)
            _launch_latent_values(
                (num_heads, -(-batch.num_decodes * batch.decode_rows // VALUE_ROWS)),
                (
                    output,
                    partial,
                    partial_lse,
                    values,
                    spans.ends,
                    batch.query_start,
                    batch.num_decodes,
                    batch.decode_rows,
                    num_heads,
                    work.num_rows,
                ),
                variant.value_constexprs(value),
            )
    return output


def _mapped(
    variant: LatentVariant,
    query: Tensor,
    keys: Tensor,
    angles: tuple[Tensor, Tensor],
    query_scale: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return queries (num_tokens, num_heads, width) that read latents, and their inverse scales.

    Of codes, queries are as large as float16 holds; the inverses (num_tokens, num_heads) float32
    are powers of two.
    """
    num_tokens, num_heads, query_dim = query.shape
    width, plain = variant.latent + variant.rotary, keys.shape[1]
    assert query_dim == plain + variant.rotary, (query.shape, keys.shape)
    assert keys.dtype == query.dtype, (keys.dtype, query.dtype)
    assert keys.is_contiguous()
    assert query.stride()[1:] == (query_dim, 1), query.stride()
    mapped = query.new_empty((num_tokens, num_heads, width), dtype=variant.compute_dtype)
    undo = None
    if variant.kv_format.is_quantized:
        undo = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
    fixed = variant.map_constexprs(plain, num_tokens)
    block_m = fixed["BLOCK_M"]
    assert isinstance(block_m, int)
    cos, sin = angles
    _launch_map(
        (num_heads, -(-num_tokens // block_m)),
        (
            mapped,
            undo,
            query,
            keys,
            cos.contiguous(),
            sin.contiguous(),
            query_scale,
            num_tokens,
            num_heads,
            query.stride(0),
        ),
        fixed,
    )
    return mapped, undo


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
