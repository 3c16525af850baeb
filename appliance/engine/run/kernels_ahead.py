"""Compiles the kernels of the steps that `measure` runs, several at a time.

One at a time, as steps need them, they would take most of a first start.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from appliance.kernels.kv_cache import LayerPrecision
    from appliance.model.decoder import Decoder


def compile_kernels(
    decoder: Decoder,
    kv_layers: Sequence[LayerPrecision],
    first_steps: Callable[[Decoder, Sequence[LayerPrecision]], object],
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Compile everything that a Triton decoder's first steps need; launch nothing."""
    from appliance.kernels.compile_ahead import compiled_ahead

    kept = distinct_layers(decoder, kv_layers)
    few = replace(
        decoder,
        spec=replace(decoder.spec, layers=tuple(decoder.spec.layers[i] for i in kept)),
        layers=tuple(decoder.layers[i] for i in kept),
    )
    with compiled_ahead(lambda done, total: on_progress("kernels", done, total)):
        first_steps(few, [kv_layers[i] for i in kept])


def distinct_layers(decoder: Decoder, kv_layers: Sequence[LayerPrecision]) -> list[int]:
    """Return one layer of each kind, and the last one: only it drops rows that need no logits."""
    last = len(decoder.layers) - 1
    kinds: dict[Hashable, int] = {}
    for index, layer in enumerate(decoder.layers):
        kind = _kind((decoder.spec.layers[index], layer, kv_layers[index], index == last))
        kinds.setdefault(kind, index)
    return list(kinds.values())


def _kind(value: Any) -> Hashable:
    """Return everything that launches may depend on: all but the numbers in tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if is_dataclass(value):
        return type(value), *(_kind(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    kind: Hashable = value
    return kind
