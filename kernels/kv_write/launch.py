"""Launches the KV write: checks and the grid."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.kv_page.codes import hadamard_size
from appliance.kernels.kv_page.layout import DIM_STEP, layout_name, page_bytes, stored_dims
from appliance.kernels.kv_write.kernel import kv_write_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.operations import HeadNorms

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WARPS = 4
WARP_ELEMENTS = 256  # of one tensor: 8 per thread, one 16-byte load each
_launch_write = Launcher(kv_write_kernel)


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write every row's key and value into its slot, in place; see `reference.write_kv`.

    Args:
        key: (num_tokens, num_kv_heads, head_dim) bfloat16, float16 or float32; the heads of a row
            lie side by side.
        value: same shape and dtype.
        cache: the pages of one layer.
        slot_mapping: (num_tokens,) int64, block * block_size + offset; no slot twice, and a
            row with a negative slot is not written.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    _launch(None, key, value, None, cache, slot_mapping, None)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Apply norm, RoPE and Hadamard transform to queries and keys, and write keys and values.

    In one launch; see `reference.rotate_and_write_with` for the arguments.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    heads = qkv.shape[1] - 2 * cache.num_kv_heads, cache.num_kv_heads, cache.num_kv_heads
    query, key, value = qkv.split_with_sizes(heads, dim=1)
    output = _launch(query, key, value, (cos, sin), cache, slot_mapping, norms)
    assert output is not None
    return output


def _launch(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    cache: LayerCache,
    slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor | None:
    assert isinstance(cache, KVPages)
    assert cache.format is not KVFormat.INT4_SEALED, "rows go to open blocks"
    num_tokens, num_kv_heads, head_dim = key.shape
    assert value.shape == key.shape, (value.shape, key.shape)
    assert (num_kv_heads, head_dim) == (cache.num_kv_heads, cache.head_dim)
    if key.dtype not in FLOAT_DTYPES or value.dtype != key.dtype:
        msg = (
            f"the KV write on the GPU has no kernel for keys of {key.dtype} and values of "
            f"{value.dtype}; supported: {', '.join(map(str, FLOAT_DTYPES))}, the same for both"
        )
        raise UnsupportedModelError(msg)
    output = None if query is None else query.new_empty(query.shape)
    if not num_tokens:
        return output
    for rows in (query, key, value):
        assert rows is None or _lie_side_by_side(rows), rows.stride()
    # The keys of `write_kv` have no mean any more.
    mean = None if angles is None else cache.key_mean
    cos, sin = (None, None) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    form = cache.format, num_kv_heads, head_dim
    half = 0 if cos is None else cos.shape[1]
    parts = norms is not None, mean is not None, query is not None, cache.in_rows
    options = _options(form, half, parts)
    block = options["BLOCK_HEADS"]
    num_heads = 0 if query is None else query.shape[1]
    programs = -(-num_kv_heads // block) + -(-num_heads // block)
    quantized = cache.format.is_quantized
    arguments = (
        output,
        cache.pages if quantized else cache.elements,
        cache.halves if quantized else None,
        cache.head_scales,
        query,
        key,
        value,
        cos,
        sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        mean,
        slot_mapping,
        0 if query is None else query.stride(0),
        key.stride(0),
        value.stride(0),
        num_heads,
        num_kv_heads,
        0.0 if norms is None else norms.eps,
    )
    with device_of(key):
        _launch_write((num_tokens, programs), arguments, options)
    return output


def _lie_side_by_side(rows: Tensor) -> bool:
    """Return True if the heads of a row do; cheaper than a view of the first row."""
    _, num_heads, head_dim = rows.shape
    return rows.stride(2) == 1 and (num_heads == 1 or rows.stride(1) == head_dim)


@cache
def _options(
    form: tuple[KVFormat, int, int], half: int, parts: tuple[bool, bool, bool, bool]
) -> dict[str, Any]:
    has_norm, has_mean, has_query, in_rows = parts
    fixed = constexprs(
        *form,
        half=half,
        has_norm=has_norm,
        has_mean=has_mean,
        has_query=has_query,
        in_rows=in_rows,
    )
    return {**fixed, "num_warps": num_warps(fixed)}


class KVWriteConstexprs(TypedDict):
    """The compile-time arguments of `kv_write_kernel`."""

    KV_FORMAT: str
    HEAD_DIM: int
    HEAD_DIM_PADDED: int
    HEAD_DIM_STORED: int
    PAGE_ELEMENTS: int
    HALF: int
    HAS_NORM: bool
    HAS_MEAN: bool
    HADAMARD: int
    HAS_QUERY: bool
    BLOCK_HEADS: int


def constexprs(
    kv_format: KVFormat,
    num_kv_heads: int,
    head_dim: int,
    *,
    half: int = 0,
    has_norm: bool = False,
    has_mean: bool = False,
    has_query: bool = False,
    in_rows: bool = False,
) -> KVWriteConstexprs:
    """Return the compile-time arguments of `kv_write_kernel`.

    Args:
        half: half of the rotated dimensions; 0 leaves RoPE out, and the Hadamard transform too.
        has_norm: query and key heads are normed.
        has_mean: the keys have a mean to subtract.
        has_query: there are queries.
        in_rows: the codes of a token lie side by side.
    """
    padded = max(DIM_STEP, _power_of_two(head_dim))
    element = 1 if kv_format.is_quantized else kv_format.storage_dtype.itemsize
    return {
        "KV_FORMAT": layout_name(kv_format.value, in_rows),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded,
        "HEAD_DIM_STORED": stored_dims(kv_format.value, head_dim),
        "PAGE_ELEMENTS": page_bytes(kv_format.value, head_dim) // element,
        "HALF": half,
        "HAS_NORM": has_norm,
        "HAS_MEAN": has_mean,
        "HADAMARD": hadamard_size(head_dim) if kv_format.is_rotated and half else 0,
        "HAS_QUERY": has_query,
        "BLOCK_HEADS": min(_power_of_two(num_kv_heads), MAX_WARPS * WARP_ELEMENTS // padded),
    }


def num_warps(fixed: KVWriteConstexprs) -> int:
    """Return as many warps as have a wide load each."""
    elements = fixed["BLOCK_HEADS"] * fixed["HEAD_DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
