"""Named shapes of paged attention, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention.variant import (
    COMPUTE_NAMES,
    Phase,
    Tile,
    Variant,
    choose_tile,
    padded,
)
from appliance.kernels.paged_attention.work import MAX_SPANS
from appliance.kernels.signature import MOST_COMPILED, KernelSignature

MODULE = "appliance.kernels.paged_attention.kernel"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 32
    window: int | None = None
    softcap: float | None = None


SHAPES = (
    AttentionShape("smollm2_135m", 9, 3, 64, block_size=16),
    AttentionShape("llama_8b", 32, 8, 128),
    AttentionShape("gemma2_9b", 16, 8, 256, window=4096, softcap=50.0),
    AttentionShape("gemma3_270m", 4, 1, 256, window=512),
    AttentionShape("qwen3_32b", 64, 8, 128),
    AttentionShape("phi3_mini", 32, 32, 96),
    AttentionShape("phi2", 32, 32, 80),
)
CORE_SHAPES = SHAPES[:3]  # each head_dim and option once


@dataclass(frozen=True, slots=True)
class Lengths:
    """The sequences of one step, decode rows first."""

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]


# What is measured: a batch of decodes, one long sequence, a first chunk, a mixed step.
LENGTHS = (
    Lengths("decode_1x1k", (1,), (1024,)),
    Lengths("decode_1x32k", (1,), (32768,)),
    Lengths("decode_16x1k", (1,) * 16, (1024,) * 16),
    Lengths("decode_16x8k", (1,) * 16, (8192,) * 16),
    Lengths("decode_64x1k", (1,) * 64, (1024,) * 64),
    Lengths("prefill_2k", (2048,), (2048,)),
    Lengths("prefill_2k_of_8k", (2048,), (8192,)),
    Lengths("mixed", (1,) * 15 + (512,), (1024,) * 15 + (2048,)),
)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """All that is compiled and gated for one compute capability (86 is 8.6)."""
    full = capability == MOST_COMPILED
    precisions = [(torch.bfloat16, KVFormat.BF16), (torch.bfloat16, KVFormat.INT8)]
    shapes = SHAPES if full else CORE_SHAPES
    for shape, phase, (dtype, kv_format) in product(shapes, Phase, precisions):
        yield attention_signature(shape, phase, dtype, kv_format, capability)
    if full:
        precisions = [
            (torch.float16, KVFormat.FP16),
            (torch.float32, KVFormat.FP32),
            (torch.float32, KVFormat.INT8),
        ]
        for phase, (dtype, kv_format) in product(Phase, precisions):
            yield attention_signature(SHAPES[1], phase, dtype, kv_format, capability)
    for shape in CORE_SHAPES if full else SHAPES[1:2]:
        yield merge_signature(shape)


def attention_signature(
    shape: AttentionShape,
    phase: Phase,
    dtype: torch.dtype,
    kv_format: KVFormat,
    capability: int,
    tile: Tile | None = None,
) -> KernelSignature:
    """How `paged_attention_kernel` is compiled for a layer; the tile is the shipped one if None."""
    variant = Variant(
        phase=phase,
        kv_format=kv_format,
        dtype=dtype,
        group=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        has_window=shape.window is not None,
        has_softcap=shape.softcap is not None,
    )
    tile = tile or choose_tile(variant, capability)
    activation = f"*{COMPUTE_NAMES[dtype]}"
    elements = "*i8" if kv_format is KVFormat.INT8 else f"*{kv_format.value}"
    types = {
        "output_ptr": activation,
        "query_ptr": activation,
        "keys_ptr": elements,
        "values_ptr": elements,
        "work_ptr": "*i32",
        "query_start_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "query_stride": "i32",
        "block_tables_stride": "i32",
        "num_kv_heads": "i32",
        "log2_scale": "fp32",
        "tanh_scale": "fp32",
        "window": "i32",
    }
    if kv_format.is_quantized:
        types |= {"key_scales_ptr": "*fp16", "value_scales_ptr": "*fp16"}
    if phase is Phase.DECODE:
        types |= {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    absent = {"key_scales_ptr", "value_scales_ptr", "partial_ptr", "partial_lse_ptr"} - types.keys()
    return KernelSignature(
        name=f"attention {phase.value} {shape.name} {COMPUTE_NAMES[dtype]} kv {kv_format.value}",
        module=MODULE,
        function="paged_attention_kernel",
        types=types,
        constexprs=variant.constexprs(tile) | dict.fromkeys(absent),
        multiples_of_16=frozenset({"query_stride"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
    )


def merge_signature(shape: AttentionShape) -> KernelSignature:
    """How `merge_partials_kernel` is compiled for a layer with BF16 activations."""
    return KernelSignature(
        name=f"merge {shape.name} bf16",
        module=MODULE,
        function="merge_partials_kernel",
        types={
            "output_ptr": "*bf16",
            "partial_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            "work_ptr": "*i32",
            "query_start_ptr": "*i32",
            "num_heads": "i32",
        },
        constexprs={
            "HEAD_DIM": shape.head_dim,
            "HEAD_DIM_PADDED": padded(shape.head_dim),
            "MAX_PARTIALS": MAX_SPANS,
        },
        multiples_of_16=frozenset(),
        num_warps=4,
        num_stages=1,
    )
