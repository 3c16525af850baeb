"""Makes `class_defaults.json`: what absent and null settings mean to transformers' classes.

Nothing is written by hand: each class is built with a setting left out, null or changed, and its
attributes are read. `python class_tables.py` writes the file anew.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import math
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

from appliance.model.encoder.families import ENCODERS
from appliance.model.families import reader
from appliance.model.families.registry import CLASSES_OF_TYPES, FAMILIES, TWO_WAY_RELATIVES
from appliance.model.families.text_parts import FAMILIES_OF_TEXTS
from appliance.model.vision.families.registry import TOWERS

TABLE = Path(reader.__file__).with_name("class_defaults.json")
# Text parts of larger models, and variants, that a family reads but that have a class of their own.
_MAKERS_OWN = {"exaone4_5_text", "kimi_k2"}  # transformers has no classes of these names
OTHER_TYPES = (
    "granitemoeshared",
    *sorted((FAMILIES_OF_TEXTS.keys() - _MAKERS_OWN) | CLASSES_OF_TYPES.keys()),
)
_PROBES: tuple[Any, ...] = (7, 0.125, True, False, "silu", [0], [0.0, 5.0])
_UNKNOWN = object()
_TYPED: dict[str, Any] = {"list": None, "dict": None, "float": 2.5, "int": 3, "bool": True}
_SECTIONS = ("per_layer_config", "rope_scaling")  # of settings, with no default of their own
_READS = re.compile(r"config\.([a-z_]\w*)\b(?!\()|getattr\((?:self\.)?config, \"(\w+)\"")


def make() -> dict[str, Any]:
    """Query the classes of all families, and those of models that have a text part."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    types = {family.model_type for family in FAMILIES} | {each.model_type for each in ENCODERS}
    types |= TWO_WAY_RELATIVES.keys()
    types |= set(OTHER_TYPES)
    for family in TOWERS:
        types |= {*family.tower_types, *family.tower_types.values()}
    types &= set(CONFIG_MAPPING)  # transformers has no class of InternLM 2
    parts: dict[str, str] = {}
    for name in CONFIG_MAPPING:
        specs: dict[str, Any] = CONFIG_MAPPING[name].sub_configs_defaults
        if "text_config" in specs:
            parts[name] = specs["text_config"].model_type
    return {
        "classes": {name: _of_class(CONFIG_MAPPING[name]) for name in sorted(types)},
        "text_types": dict(sorted(parts.items())),
    }


def written(table: dict[str, Any]) -> str:
    """The file's text: one line for each class."""
    lines = [
        ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True, separators=(',', ':'))}"
            for name, entry in table[part].items()
        )
        for part in ("classes", "text_types")
    ]
    return f'{{"classes": {{\n{lines[0]}\n}},\n"text_types": {{\n{lines[1]}\n}}}}\n'


def settings_of(model_type: str) -> dict[str, Any]:
    """Settings that a class knows under any name, each with its default, or a value of its type."""
    from transformers import CONFIG_MAPPING

    asked = _Class(CONFIG_MAPPING[model_type])
    found = {name: _plain(item.default) for name, item in asked.fields.items()}
    found |= {key: None if value is _UNKNOWN else value for key, value in asked.late.items()}
    for name, item in asked.fields.items():
        if item.default is None:
            found[name] = next((_TYPED[kind] for kind in _TYPED if kind in str(item.type)), None)
    return found | {key: found.get(own) for key, own in _mapped(asked.made, asked).items()}


class _Class:
    """A configuration class that is built again and again."""

    def __init__(self, made: Any) -> None:
        self.made = made
        base = _base_fields()
        self.fields = {item.name: item for item in fields(made) if item.name not in base}
        self.late = _late_settings(made)
        numbers: dict[str, Any] = {
            name: item.default for name, item in self.fields.items()
        } | self.late
        self.changes = [
            {name: 2 * value} for name, value in numbers.items() if type(value) in (int, float)
        ]
        self._asked: dict[str, Any] = {}

    def holds(self, key: str, **settings: Any) -> Any:
        """The value under a key; `_UNKNOWN` if the class refuses the settings."""
        named = repr(settings)
        if named not in self._asked:
            try:
                self._asked[named] = self.made(**copy.deepcopy(settings))
            except Exception:  # a class raises any kind of error
                self._asked[named] = None
        made = self._asked[named]
        try:
            return _UNKNOWN if made is None else _plain(getattr(made, key, None))
        except Exception:  # a value for each layer
            return _UNKNOWN

    def is_constant(self, key: str, value: Any, **settings: Any) -> bool:
        """Return True if no other number changes the value under a key."""
        changes = (one for one in self.changes if not one.keys() & {key, *settings})
        held = (self.holds(key, **settings, **change) for change in changes)
        return all(one is _UNKNOWN or _is_equal(one, value) for one in held)


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a config whose layers differ
        return False


def _base_fields() -> set[str]:
    from transformers import PreTrainedConfig

    return {item.name for item in fields(PreTrainedConfig)}


def _of_class(made: Any) -> dict[str, Any]:
    asked = _Class(made)
    aliases = _mapped(made, asked)
    values, nulls, never_null = {}, {}, set()
    for key, item in asked.fields.items():
        default = item.default if item.default is not None else asked.holds(key)
        if item.default is not None or asked.is_constant(key, default):
            values[key] = _plain(default)
    for key, default in asked.late.items():
        target = _renamed(asked, key)
        if target is not None:
            aliases[key] = target
        elif default is not _UNKNOWN:
            values[key] = default
    values |= _rope(asked)
    for key in (*asked.fields, *asked.late, *aliases):
        own = aliases.get(key, key)
        held = asked.holds(own, **{key: None})
        if held is _UNKNOWN and "num_attention_heads" in asked.fields:
            heads: Any = asked.fields["num_attention_heads"].default
            # The default hidden_size may not be divisible by the number of heads.
            held = asked.holds(own, **{"hidden_size": 64 * heads, key: None})
        if held is _UNKNOWN or _breaks_rope(asked, key):
            never_null.add(key)
        elif key == "rope_parameters":
            nulls[key] = values.get(key)
        elif (
            held is not None and key in asked.fields and asked.is_constant(key, held, **{key: None})
        ):
            nulls[key] = held
    parts = made.sub_configs_defaults  # which have classes of their own
    values, nulls = (
        {key: value for key, value in each.items() if value is not None and key not in parts}
        for each in (values, nulls)
    )
    read = _read_by_model(made)
    known = (read | asked.late.keys()) - asked.fields.keys() - aliases.keys() - values.keys()
    found = {
        "values": values,
        "nulls": nulls,
        "never_null": sorted(never_null),
        "aliases": aliases,
        "known": sorted(known | (asked.fields.keys() - values.keys())),
    }
    return {part: content for part, content in found.items() if content}


def _mapped(made: Any, asked: _Class) -> dict[str, str]:
    """Other spellings by the field that holds their value."""
    found = {}
    for one, other in made.attribute_map.items():
        if other in asked.fields:
            found[one] = other
        elif one in asked.fields:
            found[other] = one
    return found


def _late_settings(made: Any) -> dict[str, Any]:
    """Settings that are no fields but that its methods take out of `kwargs`, with defaults."""
    found: dict[str, Any] = {}
    for name in ("__post_init__", "convert_rope_params_to_dict"):
        method = getattr(made, name)
        turns = hasattr(made, "rope_parameters") or name == "__post_init__"
        if method.__qualname__.startswith("PreTrainedConfig") or not turns:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        for call in ast.walk(tree):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in ("get", "pop", "setdefault")
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id == "kwargs"
                and isinstance(call.args[0], ast.Constant)
            ):
                key = str(call.args[0].value)
                found[key] = _evaluated(call.args[1], made) if len(call.args) > 1 else _UNKNOWN
    return {key: value for key, value in found.items() if key not in _SECTIONS}


def _evaluated(expression: ast.expr, made: Any) -> Any:
    try:
        source = ast.unparse(expression)
        return _plain(eval(source, {"self": made(), "kwargs": {}, "getattr": getattr}))
    except Exception:  # the method computes this default
        return _UNKNOWN


def _renamed(asked: _Class, key: str) -> str | None:
    """The field that takes the value of a setting that is no field."""
    for probe in _PROBES:
        if asked.holds(key, **{key: probe}) is _UNKNOWN:
            continue
        for name in asked.fields:
            held = asked.holds(name, **{key: probe})
            if held == probe and type(held) is type(probe) and asked.holds(name) != probe:
                return name
    return None


def _rope(asked: _Class) -> dict[str, Any]:
    """Rotary settings of a class without any given, and what it adds to those of a section."""
    key = "rope_parameters"
    found = asked.holds(key)
    if key not in asked.fields or not isinstance(found, dict):
        return {}
    added = asked.holds(key, rope_parameters={"rope_type": "default"})
    others = [asked.holds(key, **change) for change in asked.changes]
    own = _shared(found, [other for other in others if other is not _UNKNOWN])
    flat = {}
    if added is not _UNKNOWN and "full_attention" not in added:
        changes = [change for change in asked.changes if change.keys() <= asked.fields.keys()]
        again = [asked.holds(key, rope_parameters={"rope_type": "default"}, **it) for it in changes]
        flat = _shared(added, [other for other in again if other is not _UNKNOWN])
        flat.pop("rope_type")
    says = any(name not in ("rope_type", *flat) for name in _leaves(own))
    return flat | {key: own if says else None}


def _shared(found: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The entries that all have in common, at any depth."""
    same = {}
    for name, value in found.items():
        theirs = [other.get(name) for other in others]
        if isinstance(value, dict):
            same[name] = _shared(value, [other for other in theirs if isinstance(other, dict)])
        elif all(other == value for other in theirs):
            same[name] = value
    return same


def _leaves(section: dict[str, Any]) -> set[str]:
    found = set()
    for name, value in section.items():
        found |= _leaves(value) if isinstance(value, dict) else {name}
    return found


def _breaks_rope(asked: _Class, key: str) -> bool:
    """Return True if null would become the base of the frequencies, which breaks all."""
    held = asked.holds("rope_parameters", **{key: None})
    sections = [held, *held.values()] if isinstance(held, dict) else []
    return any(isinstance(one, dict) and one.get("rope_theta", 1) is None for one in sections)


def _read_by_model(made: Any) -> set[str]:
    """Names of settings that occur in the source of the class and of its model."""
    file = Path(inspect.getfile(made))
    model = file.with_name(file.name.replace("configuration_", "modeling_"))
    if not model.exists():  # EXAONE 3, whose model is that of another class
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        model = Path(inspect.getfile(MODEL_FOR_CAUSAL_LM_MAPPING[made]))
    return {
        name
        for text in (model.read_text(),)
        for groups in _READS.findall(text)
        for name in groups
        if name and not name.startswith("_")
    }


def _plain(value: Any) -> Any:
    """Convert a value to the form that config.json has."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


if __name__ == "__main__":
    TABLE.write_text(written(make()))
