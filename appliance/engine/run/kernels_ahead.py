"""Compiles the kernels of the steps that `measure` runs, several at a time.

Compiling them one by one, on demand, would take most of a first start.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from appliance.model.prompt_layers import PromptLayers
from appliance.model.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.model.adapters.torch_slots import TorchAdapterSlots
    from appliance.model.decoder import Decoder
    from appliance.model.spec import LayerSpec


def compile_kernels(
    decoder: Decoder,
    kv_layers: Sequence[LayerPrecision],
    first_steps: Callable[[Decoder, Sequence[LayerPrecision]], object],
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Compile every kernel of a Triton decoder's first steps; launch nothing."""
    from appliance.kernels.gpu.compile_ahead import compiled_ahead

    kept = distinct_layers(decoder, kv_layers)
    places, owners = decoder.spec.cache_places, decoder.spec.cache_layers
    with compiled_ahead(lambda done, total: on_progress("kernels", done, total)):
        first_steps(with_layers(decoder, kept), [kv_layers[places[i]] for i in kept if i in owners])


def compile_adapters(
    slots: TorchAdapterSlots, on_progress: Callable[[str, int, int], None]
) -> None:
    """Compile the kernels that add adapters to a Triton decoder's rows; launch nothing."""
    from appliance.kernels.adapters.launch import run_every_kernel
    from appliance.kernels.gpu.compile_ahead import compiled_ahead

    with compiled_ahead(lambda done, total: on_progress("kernels", done, total)):
        run_every_kernel(slots.places(), slots.count)


def distinct_layers(decoder: Decoder, kv_layers: Sequence[LayerPrecision]) -> list[int]:
    """Return one layer of each kind, the layers whose keys and values they read, and the last one.

    Only the last drops rows that need no logits.
    """
    spec, last = decoder.spec, len(decoder.layers) - 1
    attention, places = spec.attention_layers, spec.cache_places
    kinds: dict[Hashable, int] = {}
    for index, layer in enumerate(decoder.layers):
        cached = index in attention or index in spec.latent_layers
        precision = kv_layers[places[index]] if cached else None
        anywhere = replace(layer, index=0, cache_place=0)
        kinds.setdefault(_kind((spec.layers[index], anywhere, precision, index == last)), index)
    kept = set(kinds.values())
    read = (attention[index].kv_layer for index in kept & attention.keys())
    return sorted(kept | {index for index in read if index is not None})


def with_layers(decoder: Decoder, kept: list[int]) -> Decoder:
    """Return a decoder of some of the layers, with adjacent caches."""
    layers = [_reading(decoder.spec.layers[index], kept) for index in kept]
    spec = replace(decoder.spec, layers=tuple(layers))
    places = spec.cache_places
    own = tuple(
        replace(decoder.layers[index], cache_place=places[new]) for new, index in enumerate(kept)
    )
    prompts = None if decoder.prompts is None else PromptLayers(own, decoder.backend)
    return replace(decoder, spec=spec, layers=own, prompts=prompts)


def _reading(layer: LayerSpec, kept: list[int]) -> LayerSpec:
    """Renumber the layer whose keys and values this one reads."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec) or mixer.kv_layer is None:
        return layer
    return replace(layer, mixer=replace(mixer, kv_layer=kept.index(mixer.kv_layer)))


def _kind(value: Any) -> Hashable:
    """Return everything that launches may depend on: all but the numbers in tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if is_dataclass(value):
        compared = (field.name for field in fields(value) if field.compare)
        return type(value), *(_kind(getattr(value, name)) for name in compared)
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    kind: Hashable = value
    return kind
