"""Named shapes of sampling, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.sampling.launch import constexprs, num_warps

MODULE = "appliance.kernels.sampling.kernel"


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """The logits of one model."""

    name: str
    vocab_size: int


SHAPES = (
    SamplingShape("llama3_vocabulary", 128256),
    SamplingShape("smollm2", 49152),
    SamplingShape("gemma3_vocabulary", 262144),
    SamplingShape("large_vocabulary", 500_000),
)

_POINTERS = {
    "logits_ptr": "*fp32",
    "maxima_ptr": "*fp32",
    "places_ptr": "*i32",
    "flags_ptr": "*i32",
    "temperature_ptr": "*fp32",
    "top_k_ptr": "*i64",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "uniform_ptr": "*fp64",
    "masses_ptr": "*i64",
    "counts_ptr": "*i32",
    "cuts_ptr": "*i32",
    "starts_ptr": "*i32",
    "totals_ptr": "*i32",
    "values_ptr": "*fp32",
    "ids_ptr": "*i32",
    "tokens_ptr": "*i64",
}
_ROW = ("maxima_ptr", "flags_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr")
# The arguments of each kernel, in any order; and what specializes it.
_ARGUMENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "scan": (
        ("logits_ptr", "maxima_ptr", "places_ptr", "flags_ptr", "stride"),
        ("VOCAB", "NUM_CHUNKS", "CHUNK", "CHUNKS"),
    ),
    "weigh": (
        ("logits_ptr", *_ROW, "min_p_ptr", "masses_ptr", "counts_ptr", "stride"),
        ("VOCAB", "NUM_CHUNKS", "CHUNK", "CHUNKS"),
    ),
    "cut": (
        (*_ROW, "counts_ptr", "cuts_ptr", "starts_ptr", "totals_ptr"),
        ("NUM_CHUNKS", "CHUNKS", "CANDIDATES"),
    ),
    "gather": (
        ("logits_ptr", *_ROW, "cuts_ptr", "starts_ptr", "values_ptr", "ids_ptr", "stride"),
        ("VOCAB", "NUM_CHUNKS", "CHUNK", "CHUNKS", "CANDIDATES"),
    ),
    "choose": (
        (
            "logits_ptr", *_ROW, "places_ptr", "min_p_ptr", "uniform_ptr", "masses_ptr",
            "totals_ptr", "values_ptr", "ids_ptr", "tokens_ptr", "stride",
        ),
        ("VOCAB", "NUM_CHUNKS", "CHUNK", "CHUNKS", "CANDIDATES", "BLOCK"),
    ),
}  # fmt: skip


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:1]:
        for kernel in _ARGUMENTS:
            yield sampling_signature(shape, kernel)


def sampling_signature(shape: SamplingShape, kernel: str) -> KernelSignature:
    """How a kernel of sampling is compiled for a vocabulary."""
    arguments, fixed = _ARGUMENTS[kernel]
    known = constexprs(shape.vocab_size)
    return KernelSignature(
        name=f"sampling {kernel} {shape.name}",
        module=MODULE,
        function=f"{kernel}_kernel",
        types={name: {**_POINTERS, "stride": "i32"}[name] for name in arguments},
        constexprs={name: known[name] for name in fixed},
        multiples_of_16=frozenset({"stride"}),
        num_warps=num_warps(kernel, shape.vocab_size),
        num_stages=1,
    )
