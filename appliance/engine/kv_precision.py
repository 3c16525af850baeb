"""Which precision each layer's KV cache has: what was asked for, or what the checkpoint says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.engine.execution import Precision
from appliance.kernels.kv_cache import KVFormat, LayerPrecision
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.model.kv import kv_scales, planned_kv, wants_fp8

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.source import ModelSource

_FORMAT_OF_DTYPE = {
    torch.bfloat16: KVFormat.BF16,
    torch.float16: KVFormat.FP16,
    torch.float32: KVFormat.FP32,
}


def choose_kv(
    config: EngineConfig, source: ModelSource, device: torch.device, dtype: torch.dtype
) -> tuple[Precision, tuple[str, ...]]:
    """Settle the KV cache of every layer.

    Args:
        config: `kv_cache_dtype` "auto" takes what the checkpoint says, if it says anything.
        source: the model.
        device: where it runs.
        dtype: of activations.

    Returns:
        The precision, and in words whatever a person should know about it.

    Raises:
        CheckpointError: what the checkpoint says is damaged.
        UnsupportedModelError: it asks for a precision that there is not.
    """
    notes: list[str] = []
    word = config.kv_cache_dtype
    plan = planned_kv(source)
    num_layers = len(source.spec.layers)
    if plan is not None:
        asked = None if word == "auto" else _format_of(word, device)
        layers = [layer.precision(asked) for layer in plan]
    elif word == "fp8" or (word == "auto" and wants_fp8(source)):
        scales, missing = kv_scales(source)
        layers = [LayerPrecision(KVFormat.FP8, of_layer) for of_layer in scales]
        if missing:
            notes.append(
                f"{missing} of {num_layers} layers have no FP8 scales for keys and values in the "
                "checkpoint and get the scale 1; appliance quantize --kv-bits makes some"
            )
    else:
        format = _FORMAT_OF_DTYPE[dtype] if word == "auto" else _format_of(word, device)
        layers = [LayerPrecision(format)] * num_layers
    if device.type == "cuda":
        layers = _on_gpu(layers, notes)
    on_pages = not all(layer.format.has_elements for layer in layers)
    size = PAGE_TOKENS if device.type == "cuda" or on_pages else 16
    usual, _ = Counter(layer.format for layer in layers).most_common(1)[0]
    precision = Precision(
        device=device,
        dtype=dtype,
        kv_format=usual,
        block_size=config.block_size or size,
        kv_layers=tuple(layers),
    )
    return precision, tuple(notes)


def in_words(precision: Precision) -> str:
    """Such as "int8", or "20 layers int4-sealed, 10 layers k8v4"."""
    counts = Counter(layer.format.value for layer in precision.kv_layers or ())
    if len(counts) < 2:
        return precision.kv_format.value
    return ", ".join(f"{count} layers {form}" for form, count in counts.most_common())


def _format_of(word: str, device: torch.device) -> KVFormat:
    """What a setting stands for; "int4" is the best form of 4 bits that a device serves."""
    if word == "int4":
        return KVFormat.INT4_SEALED if device.type == "cpu" else KVFormat.INT4
    return KVFormat.INT4 if word == "int4-rotated" else KVFormat(word)


def _on_gpu(layers: list[LayerPrecision], notes: list[str]) -> list[LayerPrecision]:
    """What a GPU's kernels can do of it; they take no mean off the keys, and one format."""
    formats = {layer.format for layer in layers}
    if len(formats) > 1:
        notes.append("a GPU stores all layers of the KV cache in one format: int8, not as planned")
        return [LayerPrecision(KVFormat.INT8)] * len(layers)
    if any(layer.key_mean is not None for layer in layers):
        notes.append("the mean of the keys is left on: a GPU's kernels do not take it off")
        layers = [replace(layer, key_mean=None) for layer in layers]
    return layers
