"""How the gated norm is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import KernelSignature

from appliance.kernels.gated_norm.launch import NUM_WARPS, gated_norm_constexprs
from appliance.kernels.gpu.target import LEAST_DEPENDENT

# Elements of a mean square, and of a head; Mamba-2 adds what it reads, and gates first.
SHAPES = {"qwen3_5 heads of 128": (128, 128, False), "nemotron_h groups of 1024": (1024, 64, True)}
SKIPPED = {"value_ptr": "*fp32", "factor_ptr": "*fp32"}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for name in SHAPES:
        yield gated_norm_signature(name, early=capability >= LEAST_DEPENDENT)


def gated_norm_signature(name: str, *, early: bool) -> KernelSignature:
    """How `gated_norm_kernel` is compiled for BF16 activations."""
    width, head_dim, is_mamba = SHAPES[name]
    types = {
        "out_ptr": "*bf16",
        "x_ptr": "*fp32",
        "gate_ptr": "*bf16",
        "weight_ptr": "*fp32",
        **(SKIPPED if is_mamba else {}),
        **dict.fromkeys(("dim", "gate_stride", "value_stride"), "i32"),
        "eps": "fp32",
    }
    fixed = gated_norm_constexprs(
        width, head_dim, weights=is_mamba, gates_first=is_mamba, early=early
    )
    return KernelSignature(
        name=f"gated_norm {name} bf16{' early' * early}",
        module="appliance.kernels.gated_norm.kernel",
        function="gated_norm_kernel",
        types=types,
        constexprs={**fixed, **({} if is_mamba else dict.fromkeys(SKIPPED))},
        multiples_of_16=frozenset({"dim", "gate_stride", "value_stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
