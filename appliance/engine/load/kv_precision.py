"""Chooses each layer's KV cache precision: the requested one, or the checkpoint's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.engine.devices import Precision, Processor
from appliance.errors import ConfigError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision, precisions
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.model.kv import kv_scales, planned_kv, wants_fp8
from appliance.model.spec import LatentAttentionSpec

if TYPE_CHECKING:
    import torch

    from appliance.config import EngineConfig
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec

_FORMAT_OF_DTYPE = {
    "bfloat16": KVFormat.BF16,
    "float16": KVFormat.FP16,
    "float32": KVFormat.FP32,
}


def choose_kv(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device | Processor,
    dtype: Any,
    *,
    native: bool,
) -> tuple[Precision, tuple[str, ...]]:
    """Choose the KV cache precision of every layer.

    Args:
        config: `kv_cache_dtype` "auto" takes the checkpoint's, if it declares one.
        native: the CPU library executes the model.

    Returns:
        The precision, and notes for the user.

    Raises:
        CheckpointError: the checkpoint's declaration is damaged.
        UnsupportedModelError: it declares an unknown precision.
        ConfigError: this device does not support the requested one.
    """
    notes: list[str] = []
    word = config.kv_cache_dtype
    if source.spec.own_cache is not None:
        return _of_own_caches(config, source, device, dtype, native=native), ()
    if word == "k8v4" and device.type == "cuda":
        raise ConfigError(
            "--kv-cache-dtype k8v4 cannot be had on a GPU, which has no kernel for it; "
            "take int8 (more exact) or int4 (smaller)"
        )
    plan = planned_kv(source)
    num_layers = len(source.spec.cache_layers)
    if plan is not None:
        asked = None if word == "auto" else _format_of(word)
        layers = [layer.precision(asked) for layer in plan]
    elif word == "fp8" or (word == "auto" and wants_fp8(source) and not _has_latents(source)):
        scales, missing = kv_scales(source)
        layers = [LayerPrecision(KVFormat.FP8, of_layer) for of_layer in scales]
        if missing:
            notes.append(
                f"{missing} of {num_layers} layers have no FP8 scales for keys and values in the "
                "checkpoint and get the scale 1; appliance quantize --kv-bits makes some"
            )
    else:
        format = _format_of(word) if word != "auto" else _usual(config, source, dtype, native)
        layers = [LayerPrecision(format)] * num_layers
        if word == "auto" and wants_fp8(source):
            notes.append(
                f"the checkpoint asks for an FP8 KV cache, whose blocks hold no latents; they are "
                f"stored as {format.value}"
            )
    if device.type == "cuda":
        layers = _on_gpu(layers, notes)
    if native:
        on_pages = any(layer.format.is_sealed for layer in layers)
    else:
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
    _check_block_size(precision)
    _check_latents(source.spec, precision)
    return precision, tuple(notes)


def _of_own_caches(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device | Processor,
    dtype: Any,
    *,
    native: bool,
) -> Precision:
    """Name the elements of caches of transformers' classes: those of activations."""
    held = KVFormat.FP32 if native else _FORMAT_OF_DTYPE[dtype_name(dtype)]
    if config.kv_cache_dtype not in ("auto", held.value):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} cannot be had with"
            f" {source.spec.architecture}, whose sequences have caches of its own class, in"
            f" {held.value}; leave it out"
        )
    size = PAGE_TOKENS if device.type == "cuda" else 16
    layers = precisions(held, len(source.spec.cache_layers))
    return Precision(device, dtype, held, config.block_size or size, tuple(layers))


def _check_block_size(precision: Precision) -> None:
    if (
        any(layer.format.is_sealed for layer in precision.kv_layers)
        and precision.block_size != PAGE_TOKENS
    ):
        raise ConfigError(
            f"{precision.kv_format.value} KV blocks share scales between {PAGE_TOKENS} tokens, so "
            f"--block-size {precision.block_size} cannot be; leave it out"
        )


def _check_latents(spec: DecoderSpec, precision: Precision) -> None:
    """Refuse KV formats that would change latents."""
    formats, places = precision.kv_layers, spec.cache_places
    for index in spec.latent_layers:
        format = formats[places[index]].format
        if not format.has_elements:
            held = ", ".join(form.value for form in KVFormat if form.has_elements)
            raise ConfigError(
                f"layer {index} caches latents, which {format.value} blocks do not hold; choose "
                f"--kv-cache-dtype among {held}"
            )


def _has_latents(source: ModelSource) -> bool:
    return any(isinstance(layer.mixer, LatentAttentionSpec) for layer in source.spec.layers)


def _usual(config: EngineConfig, source: ModelSource, dtype: Any, native: bool) -> KVFormat:
    """Return the default format: INT8 where it is fastest and nearly lossless.

    The CPU library attends to INT8 twice as fast as to BF16. Keys with a bias or a norm have
    outlier dimensions, which one scale per token and head does not suit: INT8 moved Gemma 3's
    predictions ten times as far as SmolLM2's (scripts/bench/results/quantize).
    """
    attention = source.spec.attention_layers.values()
    is_even = all(not a.qkv_bias and a.qk_norm is None for a in attention)
    if native and is_even and config.dtype == "auto":
        return KVFormat.INT8
    return _FORMAT_OF_DTYPE[dtype_name(dtype)]


def _format_of(word: str) -> KVFormat:
    """Return the format of a setting; "int4" is the better of its two forms."""
    words = {"int4": KVFormat.INT4_SEALED, "int4-rotated": KVFormat.INT4}
    return words.get(word) or KVFormat(word)


def _on_gpu(layers: list[LayerPrecision], notes: list[str]) -> list[LayerPrecision]:
    """Replace K8V4, which no GPU kernel seals, by INT8."""
    count = sum(layer.format is KVFormat.K8V4 for layer in layers)
    if count:
        notes.append(
            f"{count} of {len(layers)} layers of the KV cache are stored as int8 instead of k8v4, "
            "for which a GPU has no kernel"
        )
    return [
        replace(layer, format=KVFormat.INT8) if layer.format is KVFormat.K8V4 else layer
        for layer in layers
    ]
