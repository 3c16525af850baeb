"""Named shapes of the gated activation, and the signatures compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU, Gating
from appliance.kernels.gated_activation.launch import BLOCK, NUM_WARPS, constexprs


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """The gate of one layer's MLP."""

    name: str
    intermediate: int
    activation: Gating
    run: int = 0  # gate and up alternate in blocks of so many columns; 0: halves


SHAPES = (
    ActivationShape("llama_8b", 14336, Activation.SILU),
    ActivationShape("llama_8b_packed", 14336, Activation.SILU, run=8),
    ActivationShape("gemma3_270m", 2048, Activation.GELU_TANH),
    ActivationShape("gpt_oss_20b", 2880, ClampedSwiGLU(limit=7.0, alpha=1.702)),
    ActivationShape("step3p7", 1280, BoundedSwiGLU(limit=7.0)),
)
NUM_TOKENS = (1, 16, 64, 512, 2048)  # the shape that benchmarks measure


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:1]:
        yield activation_signature(shape)


def activation_signature(shape: ActivationShape) -> KernelSignature:
    """How `gated_activation_kernel` is compiled for BF16 activations."""
    gating = constexprs(shape.activation)
    return KernelSignature(
        name=f"gated_activation {gating['ACTIVATION']} bf16" + " in turns" * bool(shape.run),
        module="appliance.kernels.gated_activation.kernel",
        function="gated_activation_kernel",
        types={
            "output_ptr": "*bf16",
            "gate_up_ptr": "*bf16",
            "intermediate": "i32",
            "stride": "i32",
        },
        constexprs=gating | {"RUN": shape.run, "BLOCK": BLOCK, "EARLY": False},
        multiples_of_16=frozenset({"intermediate", "stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
