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
from appliance.kernels.kv_write.reference import parts_of

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.head_norms import HeadNormKind, HeadNorms

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
    _launch(None, (key, value), None, cache, slot_mapping, None, None)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor | None,
    norms: HeadNorms | None = None,
    query_scale: Tensor | None = None,
    *,
    keys_are_values: bool = False,
) -> Tensor:
    """Bring queries and keys into their final form, and write keys and values.

    In one launch; see `reference.rotate_and_write_with` for the arguments. Rows of qkv may lie
    further apart than they are long.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    query, keys, values = parts_of(qkv, cache, slot_mapping, keys_are_values=keys_are_values)
    pair = None if keys is None or values is None else (keys, values)
    output = _launch(query, pair, (cos, sin), cache, slot_mapping, norms, query_scale)
    assert output is not None
    return output


def _launch(
    query: Tensor | None,
    pair: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor] | None,
    cache: LayerCache,
    slot_mapping: Tensor | None,
    norms: HeadNorms | None,
    query_scale: Tensor | None,
) -> Tensor | None:
    assert isinstance(cache, KVPages)
    assert cache.format is not KVFormat.INT4_SEALED, "rows go to open blocks"
    key, value = (None, None) if pair is None else pair
    any_rows = query if key is None else key
    assert any_rows is not None
    num_tokens, num_kv_heads, head_dim = len(any_rows), cache.num_kv_heads, cache.head_dim
    for rows in (query, key, value):
        assert rows is None or _lie_side_by_side(rows), rows.stride()
        assert rows is None or rows.shape[2] == head_dim, (rows.shape, head_dim)
    if key is not None and value is not None:
        assert key.shape[1] == value.shape[1] == num_kv_heads, (key.shape, value.shape)
    dtypes = {rows.dtype for rows in (query, key, value) if rows is not None}
    if len(dtypes) > 1 or not dtypes.issubset(FLOAT_DTYPES):
        msg = (
            "the KV write on the GPU has no kernel for keys and values of "
            f"{' and '.join(map(str, dtypes))}; "
            f"supported: {', '.join(map(str, FLOAT_DTYPES))}, the same for both"
        )
        raise UnsupportedModelError(msg)
    output = None if query is None else query.new_empty(query.shape)
    if not num_tokens:
        return output
    # The keys of `write_kv` have no mean any more.
    mean = None if angles is None or key is None else cache.key_mean
    cos, sin = (None, None) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    form = cache.format, num_kv_heads, head_dim
    half = None if cos is None else cos.shape[1]
    parts = mean is not None, query is not None, key is not None, cache.in_rows
    options = _options(form, half, None if norms is None else norms.kind, parts)
    block = options["BLOCK_HEADS"]
    num_heads = 0 if query is None else query.shape[1]
    programs = -(-num_heads // block) + (0 if key is None else -(-num_kv_heads // block))
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
        query_scale,
        mean,
        slot_mapping,
        0 if query is None else query.stride(0),
        0 if key is None else key.stride(0),
        0 if value is None else value.stride(0),
        num_heads,
        num_kv_heads,
        0.0 if norms is None else norms.eps,
        None if norms is None else norms.value_eps,
    )
    with device_of(any_rows):
        _launch_write((num_tokens, programs), arguments, options)
    return output


def _lie_side_by_side(rows: Tensor) -> bool:
    """Return True if the heads of a row do; cheaper than a view of the first row."""
    _, num_heads, head_dim = rows.shape
    return rows.stride(2) == 1 and (num_heads == 1 or rows.stride(1) == head_dim)


@cache
def _options(
    form: tuple[KVFormat, int, int],
    half: int | None,
    norm: HeadNormKind | None,
    parts: tuple[bool, bool, bool, bool],
) -> dict[str, Any]:
    has_mean, has_query, has_key, in_rows = parts
    fixed = constexprs(
        *form,
        half=half,
        norm=norm,
        has_mean=has_mean,
        has_query=has_query,
        has_key=has_key,
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
    NORM: str | None
    HAS_MEAN: bool
    HADAMARD: int
    HAS_QUERY: bool
    HAS_KEY: bool
    BLOCK_HEADS: int


def constexprs(
    kv_format: KVFormat,
    num_kv_heads: int,
    head_dim: int,
    *,
    half: int | None = None,
    norm: HeadNormKind | None = None,
    has_mean: bool = False,
    has_query: bool = False,
    has_key: bool = True,
    in_rows: bool = False,
) -> KVWriteConstexprs:
    """Return the compile-time arguments of `kv_write_kernel`.

    Args:
        half: half of the rotated dimensions; None: keys are final, so none is transformed either.
        norm: of query and key heads.
        has_mean: the keys have a mean to subtract.
        has_query: there are queries.
        has_key: there are keys and values.
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
        "HALF": half or 0,
        "NORM": None if norm is None else norm.value,
        "HAS_MEAN": has_mean,
        "HADAMARD": 0 if half is None or not kv_format.is_rotated else hadamard_size(head_dim),
        "HAS_QUERY": has_query,
        "HAS_KEY": has_key,
        "BLOCK_HEADS": min(_power_of_two(num_kv_heads), MAX_WARPS * WARP_ELEMENTS // padded),
    }


def num_warps(fixed: KVWriteConstexprs) -> int:
    """Return as many warps as have a wide load each."""
    elements = fixed["BLOCK_HEADS"] * fixed["HEAD_DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
