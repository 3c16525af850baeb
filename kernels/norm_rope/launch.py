"""Launches the RMS norm: checks and the grid."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early
from appliance.kernels.norm_rope.kernel import rms_norm_kernel

if TYPE_CHECKING:
    from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 16384
MAX_WARPS = 16
WARP_ELEMENTS = 512  # of one row: 16 per thread, two 16-byte loads of BF16
PROGRAM_ELEMENTS = 1024  # rows shorter than this share a program
_launch_norm = Launcher(rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`.

    Args:
        x: (..., dim) bfloat16, float16 or float32.
        weight: (dim,) float32.
        eps: added to the mean square.

    Raises:
        UnsupportedModelError: no kernel covers the width or the dtype.
    """
    dim = x.shape[-1]
    check_supported(dim, x.dtype)
    normed = x.new_empty(x.shape)
    _launch(normed, None, _rows(x), None, weight, eps)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`; one launch.

    Args:
        x: (..., dim) bfloat16, float16 or float32.
        residual: same shape and dtype.
        weight: (dim,) float32.
        eps: added to the mean square.
        in_place: write the sum to the residual, which must be contiguous, not to a new tensor.

    Raises:
        UnsupportedModelError: no kernel covers the width or the dtype.
    """
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.dtype == x.dtype, (residual.dtype, x.dtype)
    assert residual.is_contiguous() or not in_place
    check_supported(x.shape[-1], x.dtype)
    normed = x.new_empty(x.shape)
    total = residual if in_place else x.new_empty(x.shape)
    _launch(normed, total, _rows(x), _rows(residual), weight, eps)
    return normed, total


def check_supported(dim: int, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError with the supported values if no kernel covers these."""
    if dtype not in FLOAT_DTYPES:
        what, supported = f"activation dtype {dtype}", ", ".join(map(str, FLOAT_DTYPES))
    elif dim > MAX_DIM:
        what, supported = f"rows of {dim}", f"up to {MAX_DIM}"
    else:
        return
    raise UnsupportedModelError(
        f"the RMS norm on the GPU has no kernel for {what}; supported: {supported}"
    )


def _rows(x: Tensor) -> Tensor:
    """Reshape to (num_rows, dim), each row contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    normed: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> None:
    num_rows, dim = x.shape
    assert weight.shape == (dim,), (weight.shape, dim)
    assert weight.dtype is torch.float32, weight.dtype
    if not num_rows:
        return
    arguments = (
        normed,
        total,
        x,
        residual,
        weight,
        num_rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
    )
    options = _options(dim, has_residual=residual is not None, early=starts_early(x.device))
    with device_of(x):
        _launch_norm((-(-num_rows // options["BLOCK_ROWS"]),), arguments, options)


@cache
def _options(dim: int, *, has_residual: bool, early: bool) -> dict[str, Any]:
    fixed = constexprs(dim, has_residual=has_residual, early=early)
    return {**fixed, "num_warps": num_warps(fixed), **early_options(early=early)}


class RMSNormConstexprs(TypedDict):
    """The compile-time arguments of `rms_norm_kernel`."""

    HAS_RESIDUAL: bool
    DIM: int
    DIM_PADDED: int
    BLOCK_ROWS: int
    EARLY: bool


def constexprs(dim: int, *, has_residual: bool, early: bool = False) -> RMSNormConstexprs:
    """Return the compile-time arguments of `rms_norm_kernel`, the same for any number of rows."""
    padded = max(16, 1 << (dim - 1).bit_length())
    return {
        "HAS_RESIDUAL": has_residual,
        "DIM": dim,
        "DIM_PADDED": padded,
        "BLOCK_ROWS": max(1, PROGRAM_ELEMENTS // padded),
        "EARLY": early,
    }


def num_warps(fixed: RMSNormConstexprs) -> int:
    """Return as many warps as have a wide load each."""
    elements = fixed["BLOCK_ROWS"] * fixed["DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))
