"""Named shapes of the soft cap, and the signature that is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from support.kernels.compiled_kernels.signature import KernelSignature

from appliance.kernels.soft_cap.launch import BLOCK, NUM_WARPS


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """The logits of one model."""

    name: str
    vocab_size: int
    cap: float


SHAPES = (LogitsShape("gemma2_9b", 256000, 30.0),)
NUM_ROWS = (1, 16, 64, 256)  # the shape that benchmarks measure


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    assert capability
    yield KernelSignature(
        name="soft_cap bf16",
        module="appliance.kernels.soft_cap.kernel",
        function="soft_cap_kernel",
        types={
            "output_ptr": "*fp32",
            "logits_ptr": "*bf16",
            "num_elements": "i32",
            "cap": "fp32",
        },
        constexprs={"BLOCK": BLOCK},
        multiples_of_16=frozenset({"num_elements"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
