"""Named shapes of the gated activation, and the signatures compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.activation import (
    Activation,
    BoundedSwiGLU,
    ClampedSwiGLU,
    Gating,
    gate_constexprs,
)
from appliance.kernels.gated_activation.launch import BLOCK, NUM_WARPS


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
    if capability == MOST_COMPILED:
        yield ungated_signature(Activation.GELU)
        yield ungated_signature(Activation.RELU_SQUARED)
        yield heads_signature(of_heads=False)
        yield heads_signature(of_heads=True)


def ungated_signature(activation: Activation) -> KernelSignature:
    """How it is compiled for an MLP without a gate."""
    gated = activation_signature(ActivationShape("ungated", 8192, activation))
    return replace(
        gated,
        name=f"activation {activation.value} bf16",
        constexprs={**gated.constexprs, "GATED": False},
    )


def heads_signature(*, of_heads: bool) -> KernelSignature:
    """How `gate_heads_kernel` is compiled: Qwen3-Next's gates of elements, Step's of heads."""
    numbers = ("width", "head_dim", "gate_stride")
    pointers = ("output_ptr", "heads_ptr", "gate_ptr")
    return KernelSignature(
        name=f"gates of {'heads' if of_heads else 'elements'} bf16",
        module="appliance.kernels.gated_activation.kernel",
        function="gate_heads_kernel",
        types={**dict.fromkeys(pointers, "*bf16"), **dict.fromkeys(numbers, "i32")},
        constexprs={"OF_HEADS": of_heads, "BLOCK": BLOCK},
        multiples_of_16=frozenset(numbers),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def activation_signature(shape: ActivationShape) -> KernelSignature:
    """How `gated_activation_kernel` is compiled for BF16 activations."""
    gating = gate_constexprs(shape.activation)
    return KernelSignature(
        name=f"gated_activation {gating['ACTIVATION']} bf16" + " in turns" * bool(shape.run),
        module="appliance.kernels.gated_activation.kernel",
        function="gated_activation_kernel",
        types={
            "output_ptr": "*bf16",
            "gate_ptr": "*bf16",
            "intermediate": "i32",
            "stride": "i32",
            "up_stride": "i32",
        },
        constexprs=gating
        | {"up_ptr": None, "GATED": True, "RUN": shape.run, "BLOCK": BLOCK, "EARLY": False},
        multiples_of_16=frozenset({"intermediate", "stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
