"""Shapes of models by name, and how each kernel is compiled for them: a file for each kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_kernels.signatures import (
    adapters,
    block_copy,
    fp8_matmul,
    gated_activation,
    grouped_matmul,
    kv_seal,
    kv_write,
    latent_attention,
    library_tiles,
    norm_rope,
    packed_matmul,
    paged_attention,
    penalties,
    recurrence,
    sampling,
    short_conv,
    soft_cap,
    token_mask,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compiled_kernels.signature import KernelSignature

_KERNELS = (
    adapters,
    paged_attention,
    kv_write,
    latent_attention,
    library_tiles,
    kv_seal,
    block_copy,
    norm_rope,
    gated_activation,
    recurrence,
    sampling,
    short_conv,
    penalties,
    token_mask,
    soft_cap,
    packed_matmul,
    fp8_matmul,
    grouped_matmul,
)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for kernel in _KERNELS:
        yield from kernel.signatures(capability)
