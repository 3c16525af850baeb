"""Reads Gemma 4's settings from a GGUF file's metadata and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from appliance.errors import CheckpointError
from appliance.model.families.gguf_config import (
    gguf_biases,
    gguf_config,
    kv_heads,
    num_layers,
    of_layers,
)
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader

_STANDS_STILL = 1e20  # a pair with a larger frequency divisor does not rotate


def read_gemma4_gguf(file: GGUFFile) -> dict[str, Any]:
    """Convert a file's metadata to a Hugging Face config.

    Raises:
        CheckpointError: a setting or tensor is missing or wrong.
        UnsupportedModelError: a setting asks for unsupported arithmetic.
    """
    return gguf_config(file, "gemma4", _extra)


def _extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    layers, names = num_layers(meta), file.tensor_names()
    slides = _slides(meta, layers)
    readers = meta.integer("attention.shared_kv_layers", 0)
    own_full = [index for index in range(layers - readers) if not slides[index]]
    local, full = _head_dims(meta)
    heads = kv_heads(meta, meta.integer("attention.head_count"))
    heads *= layers if len(heads) == 1 else 1
    widths = of_layers(meta, "feed_forward_length")
    wide = max(widths) != min(widths)
    if wide and max(widths) != 2 * min(widths):
        raise meta.refuse("feed_forward_length", "one width, or twice it in some layers")
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        **gguf_biases(file, attention="attention_bias"),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": wide,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "sliding_window": meta.integer("attention.sliding_window"),
        "head_dim": local,
        "global_head_dim": full,
        "num_key_value_heads": max([1, *(h for h, s in zip(heads, slides, strict=True) if s)]),
        "num_global_key_value_heads": max(
            [1, *(h for h, s in zip(heads, slides, strict=True) if not s)]
        ),
        "attention_k_eq_v": bool(own_full) and f"blk.{own_full[0]}.attn_v.weight" not in names,
        "num_kv_shared_layers": readers,
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": _ropes(meta, file, full),
    }
    return config | _token_input(meta, file) | _experts(meta)


def _slides(meta: ConfigReader, layers: int) -> list[bool]:
    key = "attention.sliding_window_pattern"
    listed = meta.value(key)
    if not isinstance(listed, list) or len(listed) != layers:
        raise meta.refuse(key, f"a list of {layers} layers")
    return [bool(item) for item in listed]


def _head_dims(meta: ConfigReader) -> tuple[int, int]:
    """Read the head width of layers with and without a window."""
    full = meta.integer("attention.key_length")
    local = meta.integer("attention.key_length_swa", full)
    if meta.integer("attention.value_length_swa", local) != local:
        raise meta.refuse("attention.value_length_swa", f"{local}, as the keys have")
    if meta.integer("rope.dimension_count_swa", local) != local:
        raise meta.refuse("rope.dimension_count_swa", f"{local}, as a head has")
    return local, full


def _ropes(meta: ConfigReader, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    share = 1.0
    if FREQUENCY_DIVISORS in file.tensor_names():
        factors = cast("Tensor", file.load(FREQUENCY_DIVISORS)).flatten().tolist()
        turning = sum(factor == 1.0 for factor in factors)
        still = sum(factor > _STANDS_STILL for factor in factors)
        if turning + still != len(factors) or 2 * len(factors) != head_dim or not turning:
            raise CheckpointError(
                f"{file.path}: tensor {FREQUENCY_DIVISORS} must have 1 for the first of "
                f"{head_dim // 2} pairs of a head, and nearly no end for the others; use another "
                "file of the model"
            )
        share = turning / len(factors)
    base = meta.number("rope.freq_base", 1000000.0)
    return {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
        },
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": base,
            "partial_rotary_factor": share,
        },
    }


def _token_input(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    width, table = (
        meta.integer("embedding_length_per_layer_input", 0),
        "per_layer_token_embd.weight",
    )
    if not width:
        return {"hidden_size_per_layer_input": 0}
    if table not in file.tensor_names():
        raise CheckpointError(
            f"{file.path}: tensor {table} is missing; use another file of the model"
        )
    return {
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": file.shape(table)[0],
    }


def _experts(meta: ConfigReader) -> dict[str, Any]:
    if not meta.value("expert_count"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": meta.integer("expert_count"),
        "top_k_experts": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
    }
