"""All model families, found by a checkpoint's name of its architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.families.gemma3 import GEMMA3
from appliance.model.families.llama import LLAMA
from appliance.model.families.mistral import MISTRAL
from appliance.model.families.phi3 import PHI3
from appliance.model.families.qwen2 import QWEN2
from appliance.model.families.qwen3 import QWEN3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.family import Family

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3)


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Find the family of a Hugging Face config by its `architectures`.

    Raises:
        UnsupportedModelError: no family covers it.
    """
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    what = ", ".join(map(str, architectures)) or "(config.json names none)"
    raise UnsupportedModelError(f"architecture {what} is not supported; supported are {supported}")


def family_of_gguf(architecture: str) -> Family:
    """Find the family of a GGUF file by its `general.architecture`.

    Raises:
        UnsupportedModelError: no family covers it.
    """
    for family in FAMILIES:
        if family.gguf is not None and family.gguf.architecture == architecture:
            return family
    supported = ", ".join(family.gguf.architecture for family in FAMILIES if family.gguf)
    raise UnsupportedModelError(
        f"GGUF architecture {architecture!r} is not supported; supported are {supported}"
    )
