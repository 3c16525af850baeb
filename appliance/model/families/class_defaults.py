"""Looks up the meaning of absent and null settings to a family's configuration class.

The table beside this file is made from transformers' classes, so that serving needs none of them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLE = Path(__file__).with_name("class_defaults.json")


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
