"""Named shapes of token masks, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature
from support.kernels.compiled_kernels.signatures.sampling import SHAPES, SamplingShape

from appliance.kernels.sampling.launch import CHUNK
from appliance.kernels.token_mask.launch import NUM_WARPS

if TYPE_CHECKING:
    from collections.abc import Iterator


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:1]:
        yield mask_signature(shape)


def mask_signature(shape: SamplingShape) -> KernelSignature:
    """How `mask_tokens_kernel` is compiled for a vocabulary."""
    return KernelSignature(
        name=f"token mask {shape.name}",
        module="appliance.kernels.token_mask.kernel",
        function="mask_tokens_kernel",
        types={
            "logits_ptr": "*fp32",
            "rows_ptr": "*i64",
            "words_ptr": "*i32",
            "stride": "i32",
            "words_stride": "i32",
        },
        constexprs={"VOCAB": shape.vocab_size, "CHUNK": CHUNK},
        multiples_of_16=frozenset({"stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
