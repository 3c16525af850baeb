"""Named shapes of paged attention, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.attention.variant import (
    COMPUTE_NAMES,
    Phase,
    Tile,
    Variant,
    choose_tile,
)
from appliance.kernels.attention.work import SPAN_BOUNDS, SPAN_COLUMNS, SPAN_LENGTHS
from appliance.kernels.cache.kv_format import KVFormat

MODULES = {
    Phase.DECODE: "appliance.kernels.attention.decode_kernel",
    Phase.PREFILL: "appliance.kernels.attention.prefill_kernel",
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    sees_pictures: bool = False


SHAPES = (
    AttentionShape("smollm2_135m", 9, 3, 64),
    AttentionShape("llama_8b", 32, 8, 128),
    AttentionShape("gemma2_9b", 16, 8, 256, window=4096, softcap=50.0),
    AttentionShape("gemma3_270m", 4, 1, 256, window=512),
    AttentionShape("gpt_oss_20b", 64, 8, 64, window=128, has_sinks=True),
    AttentionShape("phi3_mini", 32, 32, 96),
    AttentionShape("phi2", 32, 32, 80),
)
IN_PARTS = AttentionShape("gemma4_26b", 16, 2, 512)  # warps share out its heads' dimensions
# Rows of prompts see all of their picture.
SEEING = (
    AttentionShape("gemma3_4b pictures", 8, 4, 256, sees_pictures=True),
    AttentionShape("gemma3_4b pictures in windows", 8, 4, 256, window=1024, sees_pictures=True),
    AttentionShape("gemma3_27b pictures", 32, 16, 128, sees_pictures=True),
)
LLAMA = SHAPES[1]
WIDEST = SHAPES[3]
CORE_SHAPES = SHAPES[1:3]  # the usual one, and the one with all options
FORMATS = (KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4, KVFormat.INT4_SEALED)
CORE_FORMATS = (KVFormat.BF16, KVFormat.INT4)  # elements, and the longest way from codes


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    full = capability == MOST_COMPILED
    for shape, phase in product(SHAPES if full else CORE_SHAPES, Phase):
        for kv_format in FORMATS if shape is LLAMA else CORE_FORMATS:
            yield attention_signature(shape, phase, torch.bfloat16, kv_format, capability)
    for phase, kv_format in product(Phase, FORMATS if full else (*CORE_FORMATS, KVFormat.INT8)):
        yield attention_signature(IN_PARTS, phase, torch.bfloat16, kv_format, capability)
    for phase in Phase:  # the most registers
        sealed = KVFormat.INT4_SEALED
        yield attention_signature(WIDEST, phase, torch.bfloat16, sealed, capability)
    for shape in SEEING if full else SEEING[1:]:
        for kv_format in FORMATS if full else (KVFormat.BF16, KVFormat.FP8, KVFormat.INT4_SEALED):
            yield attention_signature(shape, Phase.PREFILL, torch.bfloat16, kv_format, capability)
    if full:
        more = (
            (LLAMA, torch.float16, KVFormat.FP16),
            (LLAMA, torch.float32, KVFormat.FP32),
            (LLAMA, torch.float32, KVFormat.INT4_SEALED),  # the most shared memory
            (WIDEST, torch.float32, KVFormat.FP32),
        )
        for phase, (shape, dtype, kv_format) in product(Phase, more):
            yield attention_signature(shape, phase, dtype, kv_format, capability)
    yield spans_signature()
    yield sharing_signature()


def attention_signature(
    shape: AttentionShape,
    phase: Phase,
    dtype: torch.dtype,
    kv_format: KVFormat,
    capability: int,
    tile: Tile | None = None,
) -> KernelSignature:
    """How an attention kernel is compiled for a layer; the tile is the shipped one if None."""
    variant = Variant(
        phase=phase,
        kv_format=kv_format,
        dtype=dtype,
        group=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        has_window=shape.window is not None,
        has_softcap=shape.softcap is not None,
        has_sinks=shape.has_sinks,
    )
    tile = tile or choose_tile(variant, capability)
    activation = f"*{COMPUTE_NAMES[dtype]}"
    types = {
        "output_ptr": activation,
        "query_ptr": activation,
        "pages_ptr": "*i32" if kv_format.is_quantized else f"*{kv_format.value}",
        "query_start_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "query_stride": "i32",
        "block_tables_stride": "i32",
        "num_kv_heads": "i32",
        "score_scale": "fp32",
        "cap": "fp32",
        "window": "i32",
    }
    if phase is Phase.DECODE:
        types |= {
            "partial_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            "arrived_ptr": "*i32",
            "spans_ptr": "*i32",
            "num_spans_ptr": "*i32",
            "ends_ptr": "*i32",
            "max_rows": "i32",
            "num_rows": "i32",
            "max_groups": "i32",
        }
    else:
        types["tiles_ptr"] = "*i32"
        if shape.sees_pictures:
            types["sees_ptr"] = "*i32"
    if kv_format is KVFormat.FP8:
        types["head_scales_ptr"] = "*fp32"
    if shape.has_sinks:
        types["sinks_ptr"] = "*fp32"
    sealed = {"halves_ptr": "*fp16", "open_pages_ptr": "*i32"}
    sealed |= {"sealed_lens_ptr": "*i32", "open_tables_ptr": "*i32"}
    if kv_format is KVFormat.INT4_SEALED:
        types |= sealed
    types["open_tables_stride"] = "i32"
    absent = {"head_scales_ptr", "sinks_ptr", *sealed} - types.keys()
    if phase is Phase.PREFILL and not shape.sees_pictures:
        absent.add("sees_ptr")
    module, function = MODULES[phase], f"{phase.value}_kernel"
    if variant.multiplies_codes(capability):
        module, function = "appliance.kernels.attention.fp8_kernel", "fp8_prefill_kernel"
        types["pages_ptr"] = "*fp8e4nv"
        types.pop("open_tables_stride")
        absent -= sealed.keys()
    return KernelSignature(
        name=f"attention {phase.value} {shape.name} {COMPUTE_NAMES[dtype]} kv {kv_format.value}",
        module=module,
        function=function,
        types=types,
        constexprs=variant.constexprs(tile, capability) | dict.fromkeys(absent),
        multiples_of_16=frozenset({"query_stride"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
        loop_elements=2 * tile.block_n * shape.head_dim // (32 * tile.num_warps),
    )


def spans_signature() -> KernelSignature:
    """How the kernel that cuts contexts is compiled, where sequences may share spans."""
    pointers = ("spans", "num_spans", "ends", "shared")
    numbers = ("num_seqs", "window", "most_members", "most_spans")
    cut = {"BOUNDS": SPAN_BOUNDS, "LENGTHS": SPAN_LENGTHS}
    more = {"COLUMNS": SPAN_COLUMNS, "BLOCK": 64, **cut}
    return _cutting_signature("spans", "plan_spans_kernel", pointers, numbers, more)


def sharing_signature() -> KernelSignature:
    """How the kernel that finds shared spans is compiled."""
    pointers = ("shared", "sealed_lens", "block_tables")
    numbers = ("block_tables_stride", "most_members")
    return _cutting_signature("spans shared", "share_spans_kernel", pointers, numbers, {})


def _cutting_signature(
    name: str,
    function: str,
    pointers: tuple[str, ...],
    numbers: tuple[str, ...],
    constexprs: Mapping[str, object],
) -> KernelSignature:
    pointers += ("query_start", "context_lens")
    return KernelSignature(
        name=name,
        module="appliance.kernels.attention.spans_kernel",
        function=function,
        types={f"{pointer}_ptr": "*i32" for pointer in pointers} | dict.fromkeys(numbers, "i32"),
        constexprs=constexprs,
        multiples_of_16=frozenset(),
        num_warps=1,
        num_stages=1,
    )
