"""Find the native family of a config that a benchmark makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.registry import find_family, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.family import Family


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Find the family of a Hugging Face config by its `architectures`.

    Raises:
        UnsupportedModelError: no family covers it.
    """
    family = find_family(config)
    if family is None:
        raise unsupported(config)
    return family
