"""Names the settings that a tensor's shape depends on, for error messages.

It changes each setting: if the expected shape changes, the shape depends on it. Knows no family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError
from appliance.model.tensors import slots_beside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.family import Family
    from appliance.model.tensors import TensorSlot

_MOST_NAMED = 6


def deciding_settings(family: Family, config: Mapping[str, Any], slot: TensorSlot) -> str:
    """List the settings that a tensor's shape depends on, such as "conv_L_cache = 5".

    Returns:
        An empty string if there are none.
    """
    found = [
        f"{key} = {value}"
        for key, value in sorted(config.items())
        if type(value) is int and value > 0 and _decides(family, config, slot, key, value)
    ]
    return ", ".join(found[:_MOST_NAMED])


def _decides(
    family: Family, config: Mapping[str, Any], slot: TensorSlot, key: str, value: int
) -> bool:
    for other in (2 * value, value // 2):  # one of them may contradict other settings
        try:
            spec = family.spec({**config, key: other})
        except ApplianceError:
            continue
        shapes = {beside.name: beside.shape for beside in slots_beside(spec, family.names, slot)}
        if slot.name in shapes:
            return shapes[slot.name] != slot.shape
    return False
