"""Launches the KV write: checks what is asked for and sets up the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.kv_write.kernel import kv_write_kernel
from appliance.kernels.kv_write.spec import constexprs, num_warps

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.kv_cache import KVBlocks

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def write_kv(key: Tensor, value: Tensor, cache: KVBlocks, slot_mapping: Tensor) -> None:
    """Write every row's key and value into its slot, in place; see `reference.write_kv`.

    Args:
        key: (num_tokens, num_kv_heads, head_dim) bfloat16, float16 or float32; the heads of a row
            lie side by side.
        value: same shape and dtype.
        cache: the blocks of one layer.
        slot_mapping: (num_tokens,) int64, block * block_size + offset; no slot twice.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    assert value.shape == key.shape, (value.shape, key.shape)
    assert cache.keys.shape[2:] == key.shape[1:], (cache.keys.shape, key.shape)
    assert cache.keys.is_contiguous()
    assert cache.values.is_contiguous()
    if key.dtype not in FLOAT_DTYPES or value.dtype != key.dtype:
        msg = (
            f"the KV write on the GPU has no kernel for keys of {key.dtype} and values of "
            f"{value.dtype}; supported: {', '.join(map(str, FLOAT_DTYPES))}, the same for both"
        )
        raise UnsupportedModelError(msg)
    if not num_tokens:
        return
    assert key[0].is_contiguous(), key.stride()
    assert value[0].is_contiguous(), value.stride()
    fixed = constexprs(cache.format, num_kv_heads, head_dim)
    parts = -(-num_kv_heads // fixed["BLOCK_HEADS"])
    with torch.cuda.device(key.get_device()):
        kv_write_kernel[(num_tokens, parts)](
            cache.keys,
            cache.values,
            cache.key_scales,
            cache.value_scales,
            key,
            value,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            num_kv_heads,
            **fixed,
            num_warps=num_warps(fixed),
        )
