"""Reads a model's settings with their types and remembers which were read.

A setting that changes the arithmetic is either read by a family or refused by name. Numbers must be
in their range in `limits`. Knows no family.

What absent and null settings mean to a family's class is in the table beside this file, which is
made from transformers' classes, so that serving needs none of them.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.model.families.limits import RANGES, in_words, short, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLE = Path(__file__).with_name("class_defaults.json")
# Settings of Hugging Face configs that change a decoder's arithmetic where its class knows them,
# with neutral values. None is always neutral; a list of layers is if all of its elements are.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": ("full_attention",),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "n_routed_experts": (0,),
    "no_rope_layers": (1,),  # 1 means the layer has RoPE
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "sliding_window": (0,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
# What code that all classes of transformers share reads: masks, caches, rotations.
_OF_EVERY_CLASS = frozenset(
    {
        "add_cross_attention", "attention_chunk_size", "is_encoder_decoder", "layer_types",
        "sliding_window", "use_bidirectional_attention",
    }
)  # fmt: skip
# Settings of experts and routers, and those of them that only training or kernels read.
_ROUTING = re.compile(r"expert|router|routed|routing|moe_|top_?k")
_HARMLESS_ROUTING = frozenset(
    {
        "expert_parallel_size", "experts_implementation", "experts_per_token",
        # Say in which layers an indexer chooses anew, which up to `index_topk` tokens is all.
        "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern",
        "moe_aux_loss_coeff", "moe_aux_loss_lambda", "moe_capacity", "moe_group",
        "moe_intermediate_size", "moe_layer_freq", "moe_orthogonal_loss_lambda",
        "moe_shared_expert_overlap", "moe_use_aux_free", "moe_world_size", "moe_z_loss_lambda",
        "num_local_experts", "output_router_logits", "router_aux_loss_coef",
        "router_dtype", "router_jitter_noise", "router_z_loss_coef", "top_k",
    }
)  # fmt: skip


class ConfigReader:
    """Settings by name, type-checked when read.

    An absent setting and null mean what the family's configuration class says, if that is given;
    else the default that the reader's caller names.

    Args:
        origin: their file, for messages.
        usual: what the class knows.

    Attributes:
        if_wrong: what to do about a wrong value.
        if_missing: what to do about a missing one.
    """

    if_wrong = "take the config.json of its makers"
    if_missing = "add it as its maker's config.json has it"

    def __init__(
        self, values: Mapping[str, Any], origin: str, usual: ClassDefaults | None = None
    ) -> None:
        self.origin = origin
        self._usual = usual or ClassDefaults()
        self._given = values
        self._is_class_known = usual is not None
        self._values = self._usual.by_own_names(values)
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._own_name(key) in self._values

    def is_given(self, key: str) -> bool:
        """Return True if the settings have it, and not as null."""
        return self._values.get(self._own_name(key)) is not None

    def _own_name(self, key: str) -> str:
        return self._usual.aliases.get(key, key)

    def value(self, key: str, default: Any = None) -> Any:
        """Read a setting; `default` if it is absent or null and the class leaves it so.

        Raises:
            CheckpointError: it is null, with which its class cannot compute.
        """
        key = self._own_name(key)
        self._read.add(key)
        if key not in self._values:
            value = self._usual.values.get(key)
        elif (value := self._values[key]) is None:
            if key in self._usual.never_null:
                raise self._nothing(key, "what its kind of model has")
            value = self._usual.nulls.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value, usual = self.value(key, default), RANGES[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value not in usual:
            raise self._wrong(key, value, f"a whole number {in_words(usual)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, usual = self.value(key, default), RANGES[key]
        if isinstance(value, bool) or value not in usual:
            raise self._wrong(key, value, f"a number {in_words(usual)}")
        return float(value)

    def integer_of_layers(self, key: str) -> int:
        """Read a whole number that may be listed for each layer, the same in all.

        Raises:
            UnsupportedModelError: it differs between layers.
        """
        value = self.value(key)
        if not isinstance(value, list):
            return self.integer(key)
        if not value or len(set(self.integers(key, len(value)))) != 1:
            raise self.refuse(key, "the same number in all layers")
        return int(value[0])

    def optional_integer(self, key: str) -> int | None:
        """Read a whole number; none if it is null or 0, and nothing else counts as that."""
        value = self.value(key)
        return None if value is None or value == 0 else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false; null counts as false, as in Python."""
        is_null = key in self and self._values[self._own_name(key)] is None
        value = self.value(key, False if is_null else default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value, usual = self.value(key), RANGES[key]
        fits = isinstance(value, list) and len(value) == length
        if not fits or any(isinstance(item, bool) or item not in usual for item in value):
            raise self._wrong(key, value, f"a list of {length} numbers {in_words(usual)}")
        return tuple(float(item) for item in value)

    def layers(self, key: str, count: int) -> list[int]:
        """Read a list of some of the `count` layers; absent means none."""
        value = self.value(key, [])
        if not isinstance(value, list) or any(
            type(layer) is not int or not 0 <= layer < count for layer in value
        ):
            of = f"num_hidden_layers = {count}"
            raise self._wrong(key, value, f"a list of layers from 0 to {count - 1}, with {of}")
        return value

    def integers(self, key: str, length: int) -> tuple[int, ...]:
        """Read a list of whole numbers, each 0 or in the range of `key`."""
        value, usual = self.value(key), RANGES[key]
        fits = isinstance(value, list) and len(value) == length
        if not fits or any(type(n) is not int or (n and n not in usual) for n in value):
            raise self._wrong(key, value, f"a list of {length} whole numbers")
        return tuple(value)

    def written(self, key: str) -> str:
        """Return the name under which the settings have a value."""
        names = [name for name, own in self._usual.aliases.items() if own == self._own_name(key)]
        given = (name for name in names if name in self._given)
        counts = (
            name
            for name in given
            if self._given[name] is not None or name in self._usual.never_null
        )
        own = self._own_name(key)
        return next(counts, own if own in self._given else key)

    def knows(self, key: str) -> bool:
        """Return True if the class, or its model, reads the setting."""
        return not self._is_class_known or self._usual.knows(key)

    def has_default(self, key: str) -> bool:
        """Return True if the class has a value for the setting when it is absent."""
        return key in self._usual.values

    def assumed(self) -> dict[str, Any]:
        """Return the class's values of the settings that were read and are absent."""
        absent = self._read - self._values.keys()
        return {key: self._usual.values[key] for key in sorted(absent & self._usual.values.keys())}

    def without_effect(self) -> dict[str, Any]:
        """Return the settings that nothing read and the class does not know."""
        unread = self._values.keys() - self._read
        return {key: self._values[key] for key in sorted(unread) if not self.knows(key)}

    def section(self, key: str, usual: ClassDefaults | None = None) -> ConfigReader:
        """Read the settings nested under a key; empty if it is absent."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value, f"{self.origin}: {key}", usual)

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        if value is None:
            return self._nothing(key, expected)
        return wrong(self.origin, self.written(key), value, expected, self.if_wrong)

    def _nothing(self, key: str, expected: str) -> CheckpointError:
        """Build the error for a setting that is missing, or null where that means nothing."""
        key = self._own_name(key)
        usual = self._usual.values.get(key)
        if key not in self._values:
            return CheckpointError(
                f"{self.origin}: {key} is missing, but must be {expected}; {self.if_missing}"
            )
        advice = "replace it" if usual is None else f"remove it, which means {short(usual)}"
        return CheckpointError(
            f"{self.origin}: {self.written(key)} is null, but must be {expected}; {advice}"
        )

    def with_value(self, key: str, value: Any) -> ConfigReader:
        """Return the settings with another value; what either reads is read in both."""
        values = self._values | {self._own_name(key): value}
        reader = ConfigReader(values, self.origin, self._usual if self._is_class_known else None)
        reader._given, reader._read = self._given, self._read
        return reader

    def without(self, key: str) -> ConfigReader:
        """Return the settings without one, remembering what was read."""
        left = {name: value for name, value in self._values.items() if name != key}
        reader = ConfigReader(left, self.origin, self._usual if self._is_class_known else None)
        reader._read |= self._read
        return reader

    def refuse(self, key: str, supported: str) -> UnsupportedModelError:
        """Build the error for an unsupported value."""
        own = self._own_name(key)
        value = self._values[own] if own in self._values else self._usual.values.get(own)
        return UnsupportedModelError(
            f"{self.origin}: {self.written(key)} = {short(value)} is not supported; supported is "
            f"{supported}; choose a model of that kind"
        )

    def _changes_nothing(self, key: str) -> bool:
        """Return True for what is as usual, or what the class does not know and no other may.

        Code that comes with the checkpoint, which is never run, may know more than the class.
        """
        if key in self._usual.values and self._usual.values[key] == self._values.get(key):
            return True
        is_open = not self._is_class_known or "auto_map" in self._values or key in _OF_EVERY_CLASS
        return not is_open and not self._usual.knows(key)

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES) -> None:
        """Refuse an unread setting of `neutral` with another value."""
        for key, usual in neutral.items():
            value = self._values.get(key)
            items = value if isinstance(value, list) and "layer" in key else [value]
            if key in self._read or all(item is None or item in usual for item in items):
                continue
            if not self._changes_nothing(key):
                raise self.refuse(key, f"{usual[0]!r}" if usual else "only a model without it")

    def refuse_unknown_routing(self) -> None:
        """Refuse an unread setting whose name suggests that it changes routing."""
        for key in sorted(self._values.keys() - self._read - _HARMLESS_ROUTING):
            is_set = self._values[key] not in (None, False, 0, [], {})
            suggests = _ROUTING.search(key) and not key.endswith("_types")
            if is_set and suggests and not self._changes_nothing(key):
                raise self.refuse(key, "only a model without it")

    def refuse_unknown(self, harmless: frozenset[str]) -> None:
        """Refuse an unread setting that is not known to be harmless."""
        for key in sorted(self._values.keys() - self._read - harmless):
            if self._values[key] is not None:
                raise self.refuse(key, "only a model without it")


def class_defaults(model_type: object) -> ClassDefaults | None:
    """Return what the class of a `model_type` knows; None if it is not in the table."""
    entry = _table()["classes"].get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        return None
    sets = {part: frozenset(entry.get(part, ())) for part in ("never_null", "known")}
    return ClassDefaults(**{**entry, **sets})


def text_type(model_type: object) -> str | None:
    """Return the `model_type` of a larger model's text part whose settings do not name it."""
    if not isinstance(model_type, str):
        return None
    found: str | None = _table()["text_types"].get(model_type)
    return found


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_TABLE.read_text("utf-8"))
    return table


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """Knowledge of a class about settings.

    Attributes:
        values: of absent settings; those that depend on others are left out.
        nulls: what null means where the class replaces it by a constant.
        never_null: settings whose null it refuses, or cannot compute with.
        aliases: other names of settings. They count if both are given.
        known: names of further settings that the class or its model reads.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)
    never_null: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()

    def knows(self, key: str) -> bool:
        return key in self.values or key in self.known or key in self.aliases

    def by_own_names(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by the names of the class's fields.

        Of several names of one setting the class takes the alias, and of aliases the last. Null
        under an alias counts only where the class would refuse it.
        """
        if not self.aliases.keys() & settings.keys():
            return dict(settings)
        found = {key: value for key, value in settings.items() if key not in self.aliases}
        for key, value in settings.items():
            if key in self.aliases and (value is not None or key in self.never_null):
                found[self.aliases[key]] = value
        return found
