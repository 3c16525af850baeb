"""Chooses the KV caches to measure a checkpoint with: requested formats, and the declared one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.executor import heads_of
from appliance.model.kv import kv_scales, planned_kv, wants_fp8
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.model.source import ModelSource

KV_FORMATS = (
    KVFormat.BF16,
    KVFormat.FP8,
    KVFormat.INT8,
    KVFormat.K8V4,
    KVFormat.INT4,
    KVFormat.INT4_SEALED,
)
NAMES = {form: form.value for form in KV_FORMATS} | {KVFormat.INT4: "int4-rotated"}

Caches = dict[str, tuple[LayerPrecision, ...]]  # name -> one precision per layer


def parse_kv_formats(text: str) -> tuple[KVFormat, ...]:
    """Parse all, none, or names with commas between; raise ConfigError for unknown names."""
    if text in ("all", "none"):
        return KV_FORMATS if text == "all" else ()
    known = {name: form for form, name in NAMES.items()}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"KV cache {name!r} is not known; use all, none or {', '.join(known)}"
            )
    return tuple(dict.fromkeys(known[name] for name in names))


def caches_of(source: ModelSource, formats: Iterable[KVFormat]) -> tuple[Caches, str | None]:
    """Build the caches to measure, as they would be served.

    Each format is used in all layers, with the checkpoint's scales and means; FP8 without scales
    has scale 1. The checkpoint's declared cache comes last, unless it is one of the formats.

    Returns:
        The caches by name, and the declared one's name, if any.

    Raises:
        CheckpointError: the declaration is damaged.
        UnsupportedModelError: it asks for an unknown precision.
    """
    plan = planned_kv(source)
    scales, _ = kv_scales(source)
    caches: Caches = {}
    for form in formats:
        if plan is not None:
            caches[NAMES[form]] = tuple(layer.precision(form) for layer in plan)
        else:
            of_layers = scales if form is KVFormat.FP8 else [None] * len(scales)
            caches[NAMES[form]] = tuple(LayerPrecision(form, found) for found in of_layers)
    if plan is not None:
        declared = tuple(layer.precision() for layer in plan)
    elif wants_fp8(source):
        declared = tuple(LayerPrecision(KVFormat.FP8, found) for found in scales)
    else:
        return caches, None
    name = _in_words(declared)
    caches.setdefault(name, declared)
    return caches, name


def bytes_per_token(source: ModelSource, cache: Sequence[LayerPrecision]) -> int:
    """Return a token's bytes in all layers, scales included, without open blocks."""
    total = 0
    for layer, (num_kv_heads, head_dim) in zip(cache, heads_of(source.spec), strict=True):
        form = layer.format
        total += (
            form.bytes_per_token(num_kv_heads, head_dim)
            if form.has_elements
            else KVPages.bytes_per_token(form, num_kv_heads, head_dim)
        )
    return total


def _in_words(cache: Sequence[LayerPrecision]) -> str:
    counts = Counter(NAMES.get(layer.format, layer.format.value) for layer in cache)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counted(count, 'layer')} {name}" for name, count in counts.most_common())
