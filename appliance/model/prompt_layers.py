"""Layers whose linears round rows of prompts to int8; weights are those of the other layers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.model.attention import Attention
from appliance.model.layers import MLP, ActivatedLinear, GatedLinear
from appliance.model.linear import ConcatenatedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.operations import Backend, Linear
    from appliance.model.layers import DecoderLayer

Part = TypeVar("Part")
_WHOLES = (Attention, MLP, GatedLinear, ActivatedLinear)  # that linears are changed in


class PromptLayers:
    """The layers of a decoder for steps with prompts, made once for each first row of theirs.

    The last layer stays as it is: of most rows of prompts it needs no more than keys and values,
    and its MLP reads chosen rows in an order of their own.

    Args:
        layers: of the decoder.
        backend: with `round_prompts`.

    Attributes:
        num_linears: that round rows of prompts.
    """

    def __init__(self, layers: tuple[DecoderLayer, ...], backend: Backend) -> None:
        self._layers = layers
        self._backend = backend
        self._made: dict[int, tuple[DecoderLayer, ...]] = {}
        self.num_linears = 0
        self.behind(0)

    def behind(self, first: int) -> tuple[DecoderLayer, ...]:
        """Return the layers for rows that from `first` on all belong to prompts."""
        made = self._made.get(first)
        if made is None:
            round_prompts = self._backend.round_prompts
            rounding: list[Linear] = []
            assert round_prompts is not None, self._backend.name

            def change(linear: object) -> Linear | None:
                found = round_prompts(linear, first)
                if found is not None:
                    rounding.append(found)
                return found

            changed = [with_linears(layer, change) for layer in self._layers[:-1]]
            made = self._made[first] = *changed, *self._layers[-1:]
            self.num_linears = len(rounding)
        return made


def with_linears(layer: DecoderLayer, change: Callable[[object], Linear | None]) -> DecoderLayer:
    """Return a layer with other linears in its attention and its MLP, but in no expert.

    Args:
        layer: of a decoder.
        change: returns what replaces a linear, or None to leave it.
    """
    return replace(layer, mixer=_changed(layer.mixer, change), mlp=_changed(layer.mlp, change))


def _changed(part: Part, change: Callable[[object], Linear | None]) -> Part:
    found: Any = change(part)
    if found is not None:
        return found  # type: ignore[no-any-return]
    if isinstance(part, ConcatenatedLinear):
        parts = tuple(_changed(one, change) for one in part.parts)
        return ConcatenatedLinear(parts)  # type: ignore[return-value]
    if not isinstance(part, _WHOLES):
        return part
    assert is_dataclass(part)
    inside = {each.name: getattr(part, each.name) for each in fields(part)}
    return replace(part, **{name: _changed(one, change) for name, one in inside.items()})
