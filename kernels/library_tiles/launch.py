"""Launches the widening of the CPU library's tiles."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.library_tiles.kernel import widen_kernel
from appliance.kernels.library_tiles.reference import VALUES_OF
from appliance.kernels.library_tiles.reference import widen as widen_elements

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.structs import Format
    from appliance.kernels.library_tiles.tiles import LinearTiles


WARPS = 4
_BLOCK_K = 128
_launch_widen = Launcher(widen_kernel)


def widen_constexprs(bits: int, group: int) -> dict[str, int]:
    """Return the compile-time arguments for codes of some bits in groups of inputs."""
    return {"BITS": bits, "GROUP": group, "BLOCK_K": _BLOCK_K}


def widen(tiles: LinearTiles, dtype: torch.dtype) -> Tensor:
    """See `reference.widen`; codes are read and weights written once."""
    if tiles.dtype is not None:
        return widen_elements(tiles, dtype)
    device = tiles.codes.device
    out = torch.empty(tiles.out_features, tiles.in_features, dtype=dtype, device=device)
    table = _table(tiles.format, device)
    fixed = widen_constexprs(tiles.bits, tiles.group)
    scale, offset = tiles.factors()
    with device_of(tiles.codes):
        _launch_widen(
            (tiles.num_tiles, -(-tiles.in_features // fixed["BLOCK_K"])),
            (
                out,
                tiles.codes.view(torch.int32),
                scale,
                offset,
                table,
                tiles.order,
                tiles.out_features,
                tiles.in_features,
            ),
            {**fixed, "num_warps": WARPS, "num_stages": 1},
        )
    return out


@cache
def _table(code: Format, device: torch.device) -> Tensor | None:
    """Return what codes of a format stand for, copied to a device once."""
    values = VALUES_OF.get(code)
    return None if values is None else torch.tensor(values, device=device)
