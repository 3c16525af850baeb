"""Named shapes of latent attention, and how its kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.attention.variant import COMPUTE_NAMES, Phase, padded
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.latent_attention.variant import (
    CODES_AHEAD,
    MERGE_WARPS,
    SCALE_WARPS,
    LatentVariant,
)

MODULE = "appliance.kernels.latent_attention.kernel"
# Heads, elements of a latent, and of the rotary part beside it.
SHAPES = {
    "deepseek_v2_lite": (16, 512, 64),
    "deepseek_v3": (128, 512, 64),
    "mistral4": (32, 256, 64),
    "widest in float32": (16, 128, 64),
}
CORE, WIDEST = "deepseek_v2_lite", "widest in float32"
GEOMETRY = {"query_start_ptr": "*i32", "context_lens_ptr": "*i32"}
TABLES = {"block_tables_ptr": "*i32", "block_tables_stride": "i32"}
PARTIAL = {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32"}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    full = capability == MOST_COMPILED
    for phase in Phase:
        yield latent_signature(CORE, phase, torch.bfloat16, KVFormat.BF16, capability)
        yield latent_signature(CORE, phase, torch.bfloat16, KVFormat.INT8, capability)
        if full or capability in CODES_AHEAD:
            yield latent_signature("mistral4", phase, torch.bfloat16, KVFormat.INT8, capability)
        if full:
            yield latent_signature("mistral4", phase, torch.bfloat16, KVFormat.BF16, capability)
            yield latent_signature(CORE, phase, torch.float16, KVFormat.FP16, capability)
            yield latent_signature(WIDEST, phase, torch.float32, KVFormat.FP32, capability)
    yield latent_signature("deepseek_v3", Phase.DECODE, torch.bfloat16, KVFormat.BF16, capability)
    if full:
        yield scale_signature()
        yield merge_signature()


def latent_signature(
    name: str, phase: Phase, dtype: torch.dtype, kv_format: KVFormat, capability: int
) -> KernelSignature:
    """How a kernel that reads the cache is compiled for a layer."""
    variant = LatentVariant(kv_format, dtype, *SHAPES[name])
    tile = variant.tile(phase, capability)
    activation = f"*{COMPUTE_NAMES[dtype]}"
    types = {"query_ptr": activation, "pages_ptr": f"*{kv_format.value}"} | GEOMETRY | TABLES
    if kv_format.is_quantized:
        types |= {"pages_ptr": "*u8", "records_ptr": "*i32", "undo_ptr": "*fp32"}
        types["query_ptr"] = f"*{COMPUTE_NAMES[variant.compute_dtype]}"
    types |= {"num_heads": "i32", "score_scale": "fp32"}
    if phase is Phase.DECODE:
        types |= PARTIAL | {"spans_ptr": "*i32", "num_spans_ptr": "*i32"}
        types |= dict.fromkeys(("max_rows", "most_spans", "num_tiles"), "i32")
    else:
        types |= {"output_ptr": activation, "tiles_ptr": "*i32"}
    return KernelSignature(
        name=f"latent_attention {phase.value} {name} {COMPUTE_NAMES[dtype]} kv {kv_format.value}",
        module=MODULE,
        function=f"latent_{phase.value}_kernel",
        types=types,
        constexprs=variant.constexprs(phase, tile, is_interpreted=False)
        | ({} if kv_format.is_quantized else {"records_ptr": None, "undo_ptr": None}),
        multiples_of_16=frozenset(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
        loop_elements=tile.block_n * sum(SHAPES[name][1:]) // (32 * tile.num_warps),
    )


def scale_signature() -> KernelSignature:
    """How the kernel that converts queries to float16 is compiled."""
    width = sum(SHAPES[CORE][1:])
    return KernelSignature(
        name=f"latent_attention scale {CORE} bf16",
        module=MODULE,
        function="scale_queries_kernel",
        types={"scaled_ptr": "*fp16", "undo_ptr": "*fp32", "query_ptr": "*bf16"},
        constexprs={"WIDTH": width, "WIDTH_PADDED": padded(width)},
        multiples_of_16=frozenset(),
        num_warps=SCALE_WARPS,
        num_stages=3,
    )


def merge_signature() -> KernelSignature:
    """How the kernel that merges partial results is compiled."""
    numbers = ("num_heads", "max_rows", "most_spans", "tokens")
    variant = LatentVariant(KVFormat.BF16, torch.bfloat16, *SHAPES[CORE])
    return KernelSignature(
        name=f"latent_attention merge {CORE} bf16",
        module=MODULE,
        function="latent_merge_kernel",
        types={"output_ptr": "*bf16"} | PARTIAL | GEOMETRY | dict.fromkeys(numbers, "i32"),
        constexprs=variant.merge_constexprs,
        multiples_of_16=frozenset(),
        num_warps=MERGE_WARPS,
        num_stages=3,
    )
