"""Named shapes of the KV write, and the signatures that are compiled ahead of time for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.head_norms import HeadNormKind
from appliance.kernels.kv_write.launch import constexprs, num_warps


@dataclass(frozen=True, slots=True)
class KVWriteShape:
    """The heads of one layer of a model."""

    name: str
    num_kv_heads: int
    head_dim: int
    num_heads: int
    rotary_dim: int
    norm: HeadNormKind | None = None
    norms_values: bool = False
    scales_queries: bool = False


MODULE, FUNCTION = "appliance.kernels.kv_write.kernel", "kv_write_kernel"
STRIDES = frozenset({"query_stride", "key_stride", "value_stride"})
OPTIONAL = {
    "output_ptr", "query_ptr", "cos_ptr", "sin_ptr", "halves_ptr", "head_scales_ptr",
    "query_norm_ptr", "key_norm_ptr", "query_scale_ptr", "key_mean_ptr", "value_eps",
}  # fmt: skip
LATENT = 512, 64  # elements of a latent, and of the rotary part beside it
SHAPES = (
    KVWriteShape("llama_8b", 8, 128, 32, 128),
    KVWriteShape("smollm2_135m", 3, 64, 9, 64),
    KVWriteShape("gemma3_270m", 1, 256, 4, 256, HeadNormKind.EACH),
    KVWriteShape("phi2", 32, 80, 32, 32),
    KVWriteShape("gemma4_26b", 2, 512, 16, 128, HeadNormKind.EACH, norms_values=True),
    KVWriteShape("llama4_scout", 8, 128, 40, 128, HeadNormKind.ROTATED, scales_queries=True),
    KVWriteShape("minimax_m2", 8, 128, 48, 64, HeadNormKind.ALL),
)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for kv_format in (KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4):
        yield write_signature(SHAPES[0], kv_format)
    yield write_signature(SHAPES[0], KVFormat.INT8, has_mean=True)  # the format of open blocks
    yield latents_signature()
    for shape in SHAPES[1:] if capability == MOST_COMPILED else ():
        yield write_signature(shape, KVFormat.INT4)  # the case that takes the most resources


def latents_signature() -> KernelSignature:
    """How `kv_write_kernel` is compiled for INT8 latents of DeepSeek and GLM, in BF16."""
    fixed = constexprs(KVFormat.INT8, 1, sum(LATENT) // 2, in_rows=True)
    types = {"pages_ptr": "*u8", "halves_ptr": "*fp16", "key_ptr": "*bf16", "value_ptr": "*bf16"}
    types |= {"slot_mapping_ptr": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("num_heads", "num_kv_heads", *STRIDES), "i32")
    return KernelSignature(
        name="kv_write deepseek latents bf16 kv int8",
        module=MODULE,
        function=FUNCTION,
        types=types,
        constexprs={**fixed, **dict.fromkeys(OPTIONAL - types.keys())},
        multiples_of_16=STRIDES,
        num_warps=num_warps(fixed),
        num_stages=1,
    )


def write_signature(
    shape: KVWriteShape, kv_format: KVFormat, *, has_mean: bool = False
) -> KernelSignature:
    """How `kv_write_kernel` is compiled for a layer with BF16 activations."""
    fixed = constexprs(
        kv_format,
        shape.num_kv_heads,
        shape.head_dim,
        half=shape.rotary_dim // 2,
        norm=shape.norm,
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
        **dict.fromkeys(sorted(STRIDES), "i32"),
        "num_heads": "i32",
        "num_kv_heads": "i32",
        "eps": "fp32",
    }
    if kv_format.is_quantized:
        types["halves_ptr"] = "*fp16"
    if kv_format is KVFormat.FP8:
        types["head_scales_ptr"] = "*fp32"
    if shape.norm is not None:
        types |= {"query_norm_ptr": "*fp32", "key_norm_ptr": "*fp32"}
    if shape.norms_values:
        types["value_eps"] = "fp32"
    if shape.scales_queries:
        types["query_scale_ptr"] = "*fp32"
    if has_mean:
        types["key_mean_ptr"] = "*fp32"
    return KernelSignature(
        name=f"kv_write {shape.name} bf16 kv {kv_format.value}" + (" mean" if has_mean else ""),
        module=MODULE,
        function=FUNCTION,
        types=types,
        constexprs={**fixed, **dict.fromkeys(OPTIONAL - types.keys())},
        multiples_of_16=STRIDES,
        num_warps=num_warps(fixed),
        num_stages=1,
    )
