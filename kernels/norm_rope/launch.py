"""Launches norms: checks and the grid."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early
from appliance.kernels.norm_rope.kernel import norm_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.norm_rope.weights import NormWeights

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 16384
MAX_WARPS = 16
WARP_ELEMENTS = 512  # of one row: 16 per thread, two 16-byte loads of BF16
PROGRAM_ELEMENTS = 1024  # rows shorter than this share a program
_launch_norm = Launcher(norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`.

    Args:
        x: (..., dim) bfloat16, float16 or float32.
        weight: (dim,) float32.
        eps: added to the mean square.

    Raises:
        UnsupportedModelError: no kernel covers the width or the dtype.
    """
    return _normed(x, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `reference.layer_norm`; arguments and errors as for `rms_norm`, bias (dim,) float32."""
    return _normed(x, weight, bias, eps)


def add_norm(
    added: Tensor,
    stream: Tensor,
    norm: NormWeights | None,
    *,
    post: NormWeights | None = None,
    beside: Tensor | None = None,
    parts: tuple[NormWeights, NormWeights] | None = None,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor]:
    """See `reference.add_norm_with`; one launch.

    Raises:
        UnsupportedModelError: no kernel covers the width or the dtype.
    """
    assert stream.shape == added.shape, (stream.shape, added.shape)
    assert beside is None or beside.shape == added.shape
    assert parts is None or (beside is not None and parts[0].eps == parts[1].eps)
    for inner in (post, *(parts or ())):
        assert inner is None or inner.bias is None, "only the last norm is a LayerNorm"
    dtypes = {rows.dtype for rows in (added, stream, beside) if rows is not None}
    assert len(dtypes) == 1, dtypes
    total = added.new_empty(added.shape)
    weight, bias, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    shape = total.shape if weight is None else (*weight.shape[:-1], *total.shape)
    normed = None if weight is None else added.new_empty(shape)
    of_x, of_beside = (None, None) if parts is None else parts
    weights = (
        None if post is None else post.weight,
        None if of_x is None else of_x.weight,
        None if of_beside is None else of_beside.weight,
    )
    epsilons = eps, 0.0 if post is None else post.eps, 0.0 if of_x is None else of_x.eps
    rows = added, beside, stream
    _launch(normed, total, rows, weight, bias, weights, epsilons, scale)
    return normed, total


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    normed = x.new_empty(x.shape)
    _launch(normed, None, (x, None, None), weight, bias, (None,) * 3, (eps, 0.0, 0.0), None)
    return normed


def check_supported(dim: int, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError with the supported values if no kernel covers these."""
    if dtype not in FLOAT_DTYPES:
        what, supported = f"activation dtype {dtype}", ", ".join(map(str, FLOAT_DTYPES))
    elif dim > MAX_DIM:
        what, supported = f"rows of {dim}", f"up to {MAX_DIM}"
    else:
        return
    raise UnsupportedModelError(
        f"the norm on the GPU has no kernel for {what}; supported: {supported}"
    )


def _rows(x: Tensor | None) -> Tensor | None:
    """Reshape to (num_rows, dim), each row contiguous."""
    if x is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    normed: Tensor | None,
    total: Tensor | None,
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    weights: tuple[Tensor | None, ...],
    epsilons: tuple[float, float, float],
    scale: float | None,
) -> None:
    x, beside, stream = map(_rows, rows)
    assert x is not None
    num_rows, dim = x.shape
    check_supported(dim, x.dtype)
    for each in (weight, bias, *weights):
        assert each is None or each.shape[-1] == dim, (each.shape, dim)
        assert each is None or (each.dtype is torch.float32 and each.is_contiguous()), each.dtype
    if not num_rows:
        return
    arguments = (
        normed,
        total,
        x,
        beside,
        stream,
        weight,
        bias,
        *weights,
        num_rows,
        x.stride(0),
        0 if beside is None else beside.stride(0),
        0 if stream is None else stream.stride(0),
        *epsilons,
        scale,
    )
    count = 1 if weight is None or weight.dim() == 1 else len(weight)
    early = starts_early(x.device)
    options = _options(dim, count, is_centered=bias is not None, early=early)
    with device_of(x):
        _launch_norm((-(-num_rows // options["BLOCK_ROWS"]),), arguments, options)


@cache
def _options(dim: int, count: int, *, is_centered: bool, early: bool) -> dict[str, Any]:
    fixed = constexprs(dim, count, is_centered=is_centered, early=early)
    return {**fixed, "num_warps": num_warps(fixed), **early_options(early=early)}


class NormConstexprs(TypedDict):
    """The compile-time arguments of `norm_kernel`."""

    CENTERED: bool
    COUNT: int
    DIM: int
    DIM_PADDED: int
    BLOCK_ROWS: int
    EARLY: bool


def constexprs(
    dim: int, count: int = 1, *, is_centered: bool = False, early: bool = False
) -> NormConstexprs:
    """Return the compile-time arguments of `norm_kernel`, the same for any number of rows."""
    padded = max(16, 1 << (dim - 1).bit_length())
    return {
        "CENTERED": is_centered,
        "COUNT": count,
        "DIM": dim,
        "DIM_PADDED": padded,
        "BLOCK_ROWS": max(1, PROGRAM_ELEMENTS // padded),
        "EARLY": early,
    }


def num_warps(fixed: NormConstexprs) -> int:
    """Return as many warps as have a wide load each."""
    elements = fixed["BLOCK_ROWS"] * fixed["DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))
