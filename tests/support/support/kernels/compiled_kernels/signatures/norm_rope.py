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


POINTERS = {
    "normed_ptr": "*bf16", "total_ptr": "*bf16", "x_ptr": "*bf16", "beside_ptr": "*bf16",
    "stream_ptr": "*bf16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "post_ptr": "*fp32",
    "x_weight_ptr": "*fp32", "beside_weight_ptr": "*fp32", "scale": "fp32",
}  # fmt: skip
NORM, ADD = {"normed_ptr", "x_ptr", "weight_ptr"}, {"total_ptr", "stream_ptr"}
# Norms after each part (Gemma), a LayerNorm after parallel parts (Phi), all that a layer with
# experts of Gemma 4 takes.
FORMS = {
    "post": NORM | ADD | {"post_ptr"},
    "parallel": NORM | ADD | {"beside_ptr", "bias_ptr"},
    "experts": POINTERS.keys() - {"bias_ptr"},
}
STRIDES = {"x_stride", "beside_stride", "stream_stride"}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:2]:
        yield norm_signature(f"rms_norm {shape.name}", shape.dim, NORM)
        yield norm_signature(f"add_norm {shape.name}", shape.dim, NORM | ADD)
    if capability == MOST_COMPILED:
        for name, there in FORMS.items():
            count = 3 if name == "experts" else 1
            yield norm_signature(f"add_norm {name} widest", MAX_DIM // 2, there, count)


def norm_signature(name: str, dim: int, there: set[str], count: int = 1) -> KernelSignature:
    """How `norm_kernel` is compiled for BF16 activations.

    Args:
        there: pointers and numbers that are not None.
        count: norms of one sum.
    """
    fixed = constexprs(dim, count, is_centered="bias_ptr" in there)
    types = {name: type for name, type in POINTERS.items() if name in there}
    types |= {"num_rows": "i32", **dict.fromkeys(sorted(STRIDES), "i32")}
    types |= dict.fromkeys(("eps", "post_eps", "parts_eps"), "fp32")
    return KernelSignature(
        name=f"{name} bf16",
        module="appliance.kernels.norm_rope.kernel",
        function="norm_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys(POINTERS.keys() - there)},
        multiples_of_16=frozenset(STRIDES),
        num_warps=num_warps(fixed),
        num_stages=1,
    )
