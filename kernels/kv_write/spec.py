"""Named shapes of the KV write, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.kv_page.layout import DIM_STEP, page_bytes, stored_dims
from appliance.kernels.kv_page.reference import hadamard_size
from appliance.kernels.signature import MOST_COMPILED, KernelSignature

MAX_WARPS = 4
WARP_ELEMENTS = 256  # of one tensor: 8 per thread, one 16-byte load each


@dataclass(frozen=True, slots=True)
class KVWriteShape:
    """The heads of one layer of a model."""

    name: str
    num_kv_heads: int
    head_dim: int
    num_heads: int
    rotary_dim: int
    has_norm: bool = False


SHAPES = (
    KVWriteShape("llama_8b", 8, 128, 32, 128),
    KVWriteShape("smollm2_135m", 3, 64, 9, 64),
    KVWriteShape("gemma3_270m", 1, 256, 4, 256, has_norm=True),
    KVWriteShape("phi2", 32, 80, 32, 32),
)
NUM_TOKENS = (1, 16, 64, 512, 2048)  # what is measured


class Constexprs(TypedDict):
    """The compile-time arguments of `kv_write_kernel`."""

    KV_FORMAT: str
    HEAD_DIM: int
    HEAD_DIM_PADDED: int
    HEAD_DIM_STORED: int
    PAGE_ELEMENTS: int
    HALF: int
    HAS_NORM: bool
    HAS_MEAN: bool
    HADAMARD: int
    HAS_QUERY: bool
    BLOCK_HEADS: int


def constexprs(
    kv_format: KVFormat,
    num_kv_heads: int,
    head_dim: int,
    *,
    half: int = 0,
    has_norm: bool = False,
    has_mean: bool = False,
    has_query: bool = False,
) -> Constexprs:
    """What `kv_write_kernel` is specialized for.

    Args:
        kv_format: of the cache.
        num_kv_heads: of the layer.
        head_dim: elements of a head.
        half: half of the rotated dimensions; 0 leaves RoPE out, and the Hadamard transform too.
        has_norm: whether query and key heads are normed.
        has_mean: whether a mean is taken off the keys.
        has_query: whether there are queries.
    """
    padded = max(DIM_STEP, _power_of_two(head_dim))
    element = 1 if kv_format.is_quantized else kv_format.storage_dtype.itemsize
    return {
        "KV_FORMAT": kv_format.value,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded,
        "HEAD_DIM_STORED": stored_dims(kv_format.value, head_dim),
        "PAGE_ELEMENTS": page_bytes(kv_format.value, head_dim) // element,
        "HALF": half,
        "HAS_NORM": has_norm,
        "HAS_MEAN": has_mean,
        "HADAMARD": hadamard_size(head_dim) if kv_format.is_rotated and half else 0,
        "HAS_QUERY": has_query,
        "BLOCK_HEADS": min(_power_of_two(num_kv_heads), MAX_WARPS * WARP_ELEMENTS // padded),
    }


def num_warps(fixed: Constexprs) -> int:
    """As many as have something wide to load."""
    elements = fixed["BLOCK_HEADS"] * fixed["HEAD_DIM_PADDED"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def signatures(capability: int) -> Iterator[KernelSignature]:
    """All that is compiled and gated for one compute capability (86 is 8.6)."""
    for kv_format in (KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4):
        yield write_signature(SHAPES[0], kv_format)
    yield write_signature(SHAPES[0], KVFormat.INT8, has_mean=True)  # as open pages are written
    for shape in SHAPES[1:] if capability == MOST_COMPILED else ():
        yield write_signature(shape, KVFormat.INT4)  # what takes most


def write_signature(
    shape: KVWriteShape, kv_format: KVFormat, *, has_mean: bool = False
) -> KernelSignature:
    """How `kv_write_kernel` is compiled for a layer with BF16 activations."""
    fixed = constexprs(
        kv_format,
        shape.num_kv_heads,
        shape.head_dim,
        half=shape.rotary_dim // 2,
        has_norm=shape.has_norm,
        has_mean=has_mean,
        has_query=True,
    )
    types = {
        "output_ptr": "*bf16",
        "pages_ptr": "*u8" if kv_format.is_quantized else f"*{kv_format.value}",
        "query_ptr": "*bf16",
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "slot_mapping_ptr": "*i64",
        "query_stride": "i32",
        "key_stride": "i32",
        "value_stride": "i32",
        "num_heads": "i32",
        "num_kv_heads": "i32",
        "eps": "fp32",
    }
    if kv_format.is_quantized:
        types["halves_ptr"] = "*fp16"
    if kv_format is KVFormat.FP8:
        types["head_scales_ptr"] = "*fp32"
    if shape.has_norm:
        types |= {"query_norm_ptr": "*fp32", "key_norm_ptr": "*fp32"}
    if has_mean:
        types["key_mean_ptr"] = "*fp32"
    norms = {"query_norm_ptr", "key_norm_ptr", "key_mean_ptr"}
    pointers = {"halves_ptr", "head_scales_ptr", *norms}
    return KernelSignature(
        name=f"kv_write {shape.name} bf16 kv {kv_format.value}" + (" mean" if has_mean else ""),
        module="appliance.kernels.kv_write.kernel",
        function="kv_write_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys(pointers - types.keys())},
        multiples_of_16=frozenset({"query_stride", "key_stride", "value_stride"}),
        num_warps=num_warps(fixed),
        num_stages=1,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
