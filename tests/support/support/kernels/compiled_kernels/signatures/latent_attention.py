"""Named shapes of latent attention, and how its kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.attention.variant import COMPUTE_NAMES, Phase
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.latent_attention.variant import (
    CODES_AHEAD,
    LatentVariant,
)

MODULE = "appliance.kernels.latent_attention.kernel"
STEP_MODULE = "appliance.kernels.latent_attention.step_kernel"
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
    yield from step_signatures(KVFormat.BF16)
    yield from step_signatures(KVFormat.INT8) if full else ()
    yield values_signature()


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
        types |= dict.fromkeys(("num_rows", "num_tiles"), "i32")
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


# Elements of a head's key that do not rotate, of its value, and of the latent of queries.
PLAIN, VALUE, RANK = 128, 128, 1536


def step_signatures(kv_format: KVFormat) -> Iterator[KernelSignature]:
    """How the kernels around attention are compiled for DeepSeek V3, for one row and for many."""
    variant = LatentVariant(kv_format, torch.bfloat16, *SHAPES["deepseek_v3"])
    is_codes = kv_format.is_quantized
    angles = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    yield _signature(
        f"write kv {kv_format.value}",
        "write_latents_kernel",
        {"queries_ptr": "*bf16", "pages_ptr": "*u8" if is_codes else "*bf16"}
        | ({"halves_ptr": "*fp16"} if is_codes else {})
        | {"found_ptr": "*bf16", "norm_ptr": "*fp32", "query_norm_ptr": "*fp32"}
        | angles
        | {"slot_mapping_ptr": "*i64", "rank": "i32", "stride": "i32"}
        | {"eps": "fp32", "query_eps": "fp32"},
        variant.write_constexprs(RANK) | ({} if is_codes else {"halves_ptr": None}),
        frozenset({"stride"}),
    )
    for rows in (1, 512):
        yield _signature(
            f"map kv {kv_format.value} rows {rows}",
            "map_queries_kernel",
            {"mapped_ptr": "*fp16" if is_codes else "*bf16"}
            | ({"undo_ptr": "*fp32"} if is_codes else {})
            | {"query_ptr": "*bf16", "keys_ptr": "*bf16"}
            | angles
            | {"num_tokens": "i32", "num_heads": "i32", "query_stride": "i32"},
            variant.map_constexprs(PLAIN, rows)
            | {"scale_ptr": None}
            | ({} if is_codes else {"undo_ptr": None}),
            frozenset({"query_stride"}),
        )


def values_signature() -> KernelSignature:
    """How the kernel is compiled that merges partial results and maps them to values."""
    numbers = ("num_seqs", "max_rows", "num_heads", "num_rows")
    variant = LatentVariant(KVFormat.BF16, torch.bfloat16, *SHAPES["deepseek_v3"])
    pointers = {"output_ptr": "*bf16", "values_ptr": "*bf16"} | PARTIAL
    pointers |= {"ends_ptr": "*i32", "query_start_ptr": "*i32"}
    return _signature(
        "values",
        "latent_values_kernel",
        pointers | dict.fromkeys(numbers, "i32"),
        variant.value_constexprs(VALUE),
        frozenset(),
    )


def _signature(
    name: str,
    function: str,
    types: dict[str, str],
    fixed: dict[str, object],
    multiples_of_16: frozenset[str],
) -> KernelSignature:
    num_warps = fixed.pop("num_warps")
    assert isinstance(num_warps, int)
    return KernelSignature(
        name=f"latent_attention {name} deepseek_v3 bf16",
        module=STEP_MODULE,
        function=function,
        types=types,
        constexprs=fixed,
        multiples_of_16=multiples_of_16,
        num_warps=num_warps,
        num_stages=3,
    )
