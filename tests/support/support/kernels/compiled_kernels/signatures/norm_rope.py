"""Named shapes of the RMS norm, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.norm_rope.launch import MAX_DIM, constexprs, num_warps


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


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
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
