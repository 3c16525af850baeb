"""What a compiler must know of a kernel ahead of time. Imports neither triton nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Compute capabilities that are compiled for and gated: 8.0 is 80.
CAPABILITIES = (80, 86, 89, 90, 120)
MOST_COMPILED = 86  # where all named shapes are, the others get those that differ most


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """One specialization of a Triton kernel, and how it is to be compiled.

    Attributes:
        name: stable, names the row in tables of resources.
        module: where the kernel is defined.
        function: its name there.
        types: every run-time argument: "*bf16" is a pointer, "i32" a number.
        constexprs: every compile-time argument.
        multiples_of_16: numbers that are promised to be; pointers always are, if `aligned`.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        aligned: whether pointers are promised to be 16-byte aligned, as torch allocates them.
        max_registers: cap per thread; None leaves it to the compiler.
        fuses: whether a product and a sum may become one operation that rounds once.
        loop_elements: weights or elements of the KV cache that a lane takes in one iteration of
            the hot loop, by which its instructions are judged; 0 where that says nothing.
    """

    name: str
    module: str
    function: str
    types: Mapping[str, str]
    constexprs: Mapping[str, object]
    multiples_of_16: frozenset[str]
    num_warps: int
    num_stages: int
    aligned: bool = True
    max_registers: int | None = None
    fuses: bool = True
    loop_elements: int = 0
