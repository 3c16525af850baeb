"""The mixes that GGUF files are named after: the type of each tensor.

Which tensors get more bits is llama.cpp's choice (`llama_tensor_get_type` of its llama-quant.cpp,
with an importance matrix), so a file here is as large as one of the same name made there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.model.tensors import Role
from appliance.quant.formats.ggml_forms import FORMS, BlockScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot

HEADS_PER_KEY = 4  # from as many queries on, values are few enough to get more bits
LARGE_LAYERS = 80  # of a model of 70 billion weights, whose values get five bits


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's place in its model.

    Attributes:
        queries_per_key: heads of queries for each of keys and values.
    """

    layer: int
    layers: int
    queries_per_key: int

    @property
    def is_early(self) -> bool:
        """True in the first eighth."""
        return self.layer < self.layers // 8

    @property
    def matters(self) -> bool:
        """True in the first and last eighth, and in every third layer between."""
        is_late = self.layer >= 7 * self.layers // 8
        return self.is_early or is_late or (self.layer - self.layers // 8) % 3 == 2

    @property
    def shares_keys(self) -> bool:
        return self.queries_per_key >= HEADS_PER_KEY


@dataclass(frozen=True, slots=True)
class Mix:
    """The types of a file.

    Attributes:
        number: that a file states in `general.file_type`.
        base: type of all that no rule names.
        rules: by role, the type at a place; None for the base.
    """

    name: str
    number: int
    base: str
    rules: Mapping[Role, Callable[[Place], str | None]] = field(default_factory=dict)

    def scheme_of(self, slot: TensorSlot, spec: DecoderSpec) -> BlockScheme:
        """Choose the type of a layer's linear weight."""
        assert slot.layer is not None, slot.name
        attention = spec.attention_layers.get(slot.layer)
        shared = 1 if attention is None else attention.num_heads // attention.num_kv_heads
        rule = self.rules.get(slot.role)
        place = Place(slot.layer, len(spec.layers), shared)
        found = (None if rule is None else rule(place)) or self.base
        is_large = place.layers == LARGE_LAYERS and shared > 1
        if slot.role is Role.VALUE and is_large and found in ("Q3_K", "Q4_K"):
            found = "Q5_K"
        return BlockScheme(found)


def _always(type_name: str) -> Callable[[Place], str | None]:
    return lambda place: type_name


def _where_it_matters(place: Place) -> str | None:
    return "Q6_K" if place.matters else None


def _shared(type_name: str) -> Callable[[Place], str | None]:
    return lambda place: type_name if place.shares_keys else None


_MIXED = (
    Mix(
        "Q2_K",
        10,
        "Q2_K",
        {
            Role.VALUE: lambda place: "Q4_K" if place.shares_keys else "Q3_K",
            Role.OUTPUT: _always("Q3_K"),
            Role.DOWN: _always("Q3_K"),
        },
    ),
    Mix(
        "Q2_K_S",
        21,
        "Q2_K",
        {
            Role.VALUE: _shared("Q4_K"),
            Role.DOWN: lambda place: "Q4_K" if place.is_early else None,
        },
    ),
    Mix("Q3_K_S", 11, "Q3_K"),
    Mix(
        "Q3_K_M",
        12,
        "Q3_K",
        {
            Role.VALUE: lambda place: "Q5_K" if place.layer < 2 else "Q4_K",
            Role.OUTPUT: _always("Q4_K"),
            Role.DOWN: lambda place: "Q5_K" if place.layer < place.layers // 16 else "Q4_K",
            Role.QKV: _always("Q4_K"),
        },
    ),
    Mix(
        "Q3_K_L",
        13,
        "Q3_K",
        {
            Role.VALUE: _always("Q5_K"),
            Role.OUTPUT: _always("Q5_K"),
            Role.DOWN: _always("Q5_K"),
            Role.QKV: _always("Q4_K"),
        },
    ),
    Mix("IQ4_XS", 30, "IQ4_XS", {Role.VALUE: _shared("Q5_K")}),
    Mix("IQ4_NL", 25, "IQ4_NL", {Role.VALUE: _shared("Q5_K")}),
    Mix(
        "Q4_K_S",
        14,
        "Q4_K",
        {
            Role.VALUE: lambda place: "Q5_K" if place.layer < 4 else None,
            Role.DOWN: lambda place: "Q5_K" if place.is_early else None,
        },
    ),
    Mix(
        "Q4_K_M",
        15,
        "Q4_K",
        {Role.VALUE: _where_it_matters, Role.DOWN: _where_it_matters, Role.QKV: _always("Q5_K")},
    ),
    Mix("Q5_K_S", 16, "Q5_K"),
    Mix(
        "Q5_K_M",
        17,
        "Q5_K",
        {Role.VALUE: _where_it_matters, Role.DOWN: _where_it_matters, Role.QKV: _always("Q6_K")},
    ),
    Mix("Q6_K", 18, "Q6_K"),
)
_ALIKE = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7}
MIXES: dict[str, Mix] = {
    mix.name: mix
    for mix in (*_MIXED, *(Mix(name, number, name) for name, number in _ALIKE.items()))
}
assert {mix.base for mix in MIXES.values()} == FORMS.keys(), "all types have a mix"


def mix_of(name: str) -> Mix:
    """Return the mix of that name, in any case; `Q4_K` is short for `Q4_K_M`.

    Raises:
        ConfigError: there is none.
    """
    word = name.strip().upper()
    found = MIXES.get(word) or MIXES.get(f"{word}_M")
    if found is None:
        raise ConfigError(f"--type {name!r} is not known; use {', '.join(MIXES)}")
    return found
