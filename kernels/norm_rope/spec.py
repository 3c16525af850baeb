"""Named shapes of the RMS norm, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from appliance.kernels.signature import MOST_COMPILED, KernelSignature

MAX_DIM = 16384
MAX_WARPS = 16
WARP_ELEMENTS = 512  # of one row: 16 per thread, two 16-byte loads of BF16
PROGRAM_ELEMENTS = 1024  # rows shorter than this share a program


@dataclass(frozen=True, slots=True)
class NormShape:
    """The norm before a layer, or of each head."""

    name: str
    dim: int


SHAPES = (
    NormShape("llama_8b", 4096),
    NormShape("smollm2_135m", 576),
    NormShape("qwen3_head", 128),
    NormShape("widest", MAX_DIM),
)
NUM_ROWS = (1, 16, 64, 512, 2048)  # what is measured


class Constexprs(TypedDict):
    """The compile-time arguments of `rms_norm_kernel`."""

    HAS_RESIDUAL: bool
    DIM: int
    DIM_PADDED: int
    BLOCK_ROWS: int


def constexprs(dim: int, *, has_residual: bool) -> Constexprs:
    """What `rms_norm_kernel` is specialized for; never the number of rows."""
    padded = max(16, 1 << (dim - 1).bit_length())
    return {
        "HAS_RESIDUAL": has_residual,
        "DIM": dim,
        "DIM_PADDED": padded,
        "BLOCK_ROWS": max(1, PROGRAM_ELEMENTS // padded),
    }


def num_warps(fixed: Constexprs) -> int:
    """As many as have something wide to load."""
    elements = fixed["BLOCK_ROWS"] * fixed["DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def signatures(capability: int) -> Iterator[KernelSignature]:
    """All that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:2]:
        for has_residual in (False, True):
            yield norm_signature(shape, has_residual=has_residual)


def norm_signature(shape: NormShape, *, has_residual: bool) -> KernelSignature:
    """How `rms_norm_kernel` is compiled for BF16 activations."""
    fixed = constexprs(shape.dim, has_residual=has_residual)
    types = {
        "normed_ptr": "*bf16",
        "x_ptr": "*bf16",
        "weight_ptr": "*fp32",
        "num_rows": "i32",
        "x_stride": "i32",
        "residual_stride": "i32",
        "eps": "fp32",
    }
    residual = {"total_ptr", "residual_ptr"}
    if has_residual:
        types |= dict.fromkeys(residual, "*bf16")
    return KernelSignature(
        name=f"{'add_' if has_residual else ''}rms_norm {shape.name} bf16",
        module="appliance.kernels.norm_rope.kernel",
        function="rms_norm_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys(residual - types.keys())},
        multiples_of_16=frozenset({"x_stride", "residual_stride"}),
        num_warps=num_warps(fixed),
        num_stages=1,
    )
