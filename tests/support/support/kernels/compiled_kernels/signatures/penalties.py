"""Named shapes of penalties, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature
from support.kernels.compiled_kernels.signatures.sampling import SHAPES, SamplingShape

from appliance.kernels.penalties.launch import NUM_WARPS
from appliance.kernels.sampling.launch import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterator


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:1]:
        yield penalties_signature(shape)


def penalties_signature(shape: SamplingShape) -> KernelSignature:
    """How `penalize_kernel` is compiled for a vocabulary."""
    return KernelSignature(
        name=f"penalties {shape.name}",
        module="appliance.kernels.penalties.kernel",
        function="penalize_kernel",
        types={
            "logits_ptr": "*fp32",
            "seen_ptr": "*i32",
            "places_ptr": "*i32",
            "counted_ptr": "*i32",
            "token_ids_ptr": "*i64",
            "repetition_ptr": "*fp32",
            "presence_ptr": "*fp64",
            "frequency_ptr": "*fp64",
            "stride": "i32",
            "num_rows": "i32",
        },
        constexprs={"VOCAB": shape.vocab_size, "CHUNK": CHUNK, "COUNTS": True},
        multiples_of_16=frozenset({"stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
        fuses=False,
    )
