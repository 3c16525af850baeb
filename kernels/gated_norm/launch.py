"""Launches the gated norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from appliance.kernels.gated_norm.kernel import gated_norm_kernel
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.norm_rope.weights import NormWeights

PROGRAM_ELEMENTS = 1024  # 8 for each thread of 4 warps
NUM_WARPS = 4
_launch_gated_norm = Launcher(gated_norm_kernel)


class GatedNormConstexprs(TypedDict):
    """The compile-time arguments of `gated_norm_kernel`."""

    WIDTH: int
    WIDTH_PADDED: int
    HEAD_DIM: int
    WEIGHTS: bool
    GATES_FIRST: bool
    BLOCK: int
    EARLY: bool


def gated_norm_constexprs(
    width: int, head_dim: int, *, weights: bool, gates_first: bool, early: bool
) -> GatedNormConstexprs:
    """Return the compile-time arguments of `gated_norm_kernel`.

    Args:
        width: elements that have a mean square of their own.
        head_dim: elements with one factor of what is added, or any number.
        weights: all elements of a row have their own, not those of `width` alone.
        gates_first: gate before the norm.
        early: see `dependent_launch`.
    """
    padded = 1 << (width - 1).bit_length()
    return {
        "WIDTH": width,
        "WIDTH_PADDED": padded,
        "HEAD_DIM": head_dim,
        "WEIGHTS": weights,
        "GATES_FIRST": gates_first,
        "BLOCK": max(1, PROGRAM_ELEMENTS // padded),
        "EARLY": early,
    }


def gated_norm(
    x: Tensor,
    gate: Tensor,
    norm: NormWeights,
    dtype: torch.dtype,
    *,
    width: int,
    gates_first: bool,
    skip: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `reference.gated_norm`; rows of gate and of what is added may lie apart."""
    num_tokens, dim = x.shape
    assert x.is_contiguous(), x.stride()
    assert gate.stride(1) == 1, gate.stride()
    assert norm.weight.is_contiguous(), norm.weight.stride()
    out = torch.empty(num_tokens, dim, dtype=dtype, device=x.device)
    if not num_tokens:
        return out
    values, factors = (None, None) if skip is None else skip
    assert values is None or values[0].is_contiguous(), values.stride()
    early = starts_early(x.device)
    fixed = gated_norm_constexprs(
        width,
        width if values is None else values.shape[2],
        weights=norm.weight.numel() > width,
        gates_first=gates_first,
        early=early,
    )
    arguments = (
        out,
        x,
        gate,
        norm.weight,
        values,
        factors,
        dim,
        gate.stride(0),
        0 if values is None else values.stride(0),
        norm.eps,
    )
    options = {**fixed, "num_warps": NUM_WARPS, **early_options(early=early)}
    with device_of(x):
        _launch_gated_norm((num_tokens, -(-dim // (width * fixed["BLOCK"]))), arguments, options)
    return out
