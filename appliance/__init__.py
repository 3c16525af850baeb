"""A quantization-first LLM serving appliance for the home.

    from appliance import LLM, SamplingParams

Names are loaded on first use, so that the dashboard and `--help` never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from appliance.runtime import limit_spinning
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.grammar import Grammar
    from appliance.llm import LLM

__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "appliance.llm",
    "SamplingParams": "appliance.engine.nouns.sampling_params",
    "Grammar": "appliance.grammar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    limit_spinning()
    return getattr(import_module(_HOME[name]), name)
