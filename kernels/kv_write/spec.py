"""Named shapes of the KV write, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.signature import MOST_COMPILED, KernelSignature

MAX_WARPS = 4
WARP_ELEMENTS = 256  # of one tensor: 8 per thread, one 16-byte load each


@dataclass(frozen=True, slots=True)
class KVWriteShape:
    """The keys or values of one layer of a model."""

    name: str
    num_kv_heads: int
    head_dim: int


SHAPES = (
    KVWriteShape("llama_8b", 8, 128),
    KVWriteShape("smollm2_135m", 3, 64),
    KVWriteShape("gemma2_9b", 8, 256),
    KVWriteShape("phi2", 32, 80),
)
NUM_TOKENS = (1, 16, 64, 512, 2048)  # what is measured


class Constexprs(TypedDict):
    """The compile-time arguments of `kv_write_kernel`."""

    KV_FORMAT: str
    HEAD_DIM: int
    HEAD_DIM_PADDED: int
    BLOCK_HEADS: int


def constexprs(kv_format: KVFormat, num_kv_heads: int, head_dim: int) -> Constexprs:
    """What `kv_write_kernel` is specialized for."""
    padded = _power_of_two(head_dim)
    return {
        "KV_FORMAT": kv_format.value,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded,
        "BLOCK_HEADS": min(_power_of_two(num_kv_heads), MAX_WARPS * WARP_ELEMENTS // padded),
    }


def num_warps(fixed: Constexprs) -> int:
    """As many as have something wide to load."""
    elements = fixed["BLOCK_HEADS"] * fixed["HEAD_DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def signatures(capability: int) -> Iterator[KernelSignature]:
    """All that is compiled and gated for one compute capability (86 is 8.6)."""
    for shape in SHAPES if capability == MOST_COMPILED else SHAPES[:1]:
        for kv_format in (KVFormat.BF16, KVFormat.INT8):
            yield write_signature(shape, kv_format)


def write_signature(shape: KVWriteShape, kv_format: KVFormat) -> KernelSignature:
    """How `kv_write_kernel` is compiled for a layer with BF16 activations."""
    fixed = constexprs(kv_format, shape.num_kv_heads, shape.head_dim)
    elements = "*i8" if kv_format is KVFormat.INT8 else f"*{kv_format.value}"
    types = {
        "keys_ptr": elements,
        "values_ptr": elements,
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "slot_mapping_ptr": "*i64",
        "key_stride": "i32",
        "value_stride": "i32",
        "num_kv_heads": "i32",
    }
    scales = {"key_scales_ptr", "value_scales_ptr"}
    if kv_format.is_quantized:
        types |= dict.fromkeys(scales, "*fp16")
    return KernelSignature(
        name=f"kv_write {shape.name} bf16 kv {kv_format.value}",
        module="appliance.kernels.kv_write.kernel",
        function="kv_write_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys(scales - types.keys())},
        multiples_of_16=frozenset({"key_stride", "value_stride"}),
        num_warps=num_warps(fixed),
        num_stages=1,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
