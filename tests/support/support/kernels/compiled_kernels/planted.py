"""Signatures of kernels with planted faults, one each, to show that the gates find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from support.kernels.compiled_kernels.signature import KernelSignature
from support.kernels.compiled_kernels.signatures.packed_matmul import (
    GATE_UP,
    INT4_SYMMETRIC,
    matmul_signature,
)
from support.kernels.compiled_kernels.signatures.paged_attention import LLAMA, attention_signature

from appliance.kernels.attention.variant import Phase, Tile
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.packed_matmul.tiles import architecture


def signatures(capability: int) -> Iterator[KernelSignature]:
    if capability == 90:
        yield one_program(capability)
    if capability != 86:
        return
    decode = attention_signature(LLAMA, Phase.DECODE, torch.bfloat16, KVFormat.INT8, capability)
    yield replace(decode, name="planted: too few registers", max_registers=32)
    yield replace(decode, name="planted: no promise of alignment", aligned=False)
    # Plain casts of codes instead of the few instructions that assemble float16 numbers.
    by_cast = {**decode.constexprs, "ASM": "none"}
    yield replace(decode, name="planted decode: codes by cast", constexprs=by_cast)
    # The codes lie in the order of one warp's registers.
    yield replace(decode, name="planted decode: another order of codes", num_warps=2)
    large = attention_signature(
        LLAMA, Phase.PREFILL, torch.bfloat16, KVFormat.BF16, capability, Tile(128, 128, 8, 5)
    )
    yield replace(large, name="planted: too much shared memory")
    short = attention_signature(
        LLAMA, Phase.PREFILL, torch.bfloat16, KVFormat.INT8, capability, Tile(64, 32, 4, 3)
    )
    yield replace(short, name="planted prefill: fewer rows than dimensions, bf16 kv int8")
    yield from matmul_signatures(capability)


def order_signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield kernels that do before the wait for the kernel before what they may not."""
    for fault in ("loads", "adds", "starts the next", "never waits"):
        yield KernelSignature(
            name=f"planted early: {fault}",
            module="support.kernels.compiled_kernels.planted_early",
            function="copy_kernel",
            types={"out_ptr": "*i32", "x_ptr": "*i32"},
            constexprs={"FAULT": fault, "EARLY": True},
            multiples_of_16=frozenset(),
            num_warps=1,
            num_stages=1,
        )


def matmul_signatures(capability: int) -> Iterator[KernelSignature]:
    table = architecture(capability)
    assert table is not None
    few, more = table.tiles[0], table.tiles[3]
    plain = matmul_signature(GATE_UP, INT4_SYMMETRIC, few, capability)
    planted, form = "planted packed_matmul:", "int4 g128"
    axes = list(plain.constexprs["AXES"])  # type: ignore[call-overload]
    axes[4], axes[9] = axes[9], axes[4]  # a lane's bit in n for one in k
    other = {**plain.constexprs, "AXES": tuple(axes)}
    yield replace(
        plain, name=f"{planted} another order of codes, {form} fp32 rows 8", constexprs=other
    )
    shared = matmul_signature(GATE_UP, INT4_SYMMETRIC, replace(more, tilewise=False), capability)
    yield replace(shared, name=f"{planted} warps that share weights, {form} fp32 rows 128")
    yield replace(plain, name=f"{planted} no promise of alignment, {form} rows 8", aligned=False)


def one_program(capability: int) -> KernelSignature:
    """How a 4-bit weight is compiled with a second sum, for the product of each group."""
    table = architecture(capability)
    assert table is not None
    alone = matmul_signature(GATE_UP, INT4_SYMMETRIC, table.tiles[4], capability)
    return replace(alone, name="planted packed_matmul: one program, int4 g128 fp32 rows 128")
