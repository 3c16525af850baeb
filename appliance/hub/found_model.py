"""Finds a model, its adapters and its draft model; fetches missing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.config import cache_dir
from appliance.hub import ResolvedModel, resolve_adapters, resolve_model
from appliance.hub.draft_names import resolve_draft
from appliance.hub.growth import ignore_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig


def find_model_of(
    engine: EngineConfig, progress: Callable[[str, int, int], None] = ignore_progress
) -> tuple[ResolvedModel, EngineConfig]:
    """Find the model; return the settings with local paths of adapters and draft model.

    Args:
        progress: called with stage, done, total.

    Raises:
        ApplianceError: a file is missing or cannot be fetched, or the models do not fit together.
    """
    found = resolve_model(engine.model, cache_dir=cache_dir(), progress=progress)
    adapters = resolve_adapters(engine.lora, progress=progress)
    engine = msgspec.structs.replace(engine, lora=adapters)
    return found, resolve_draft(engine, found.path, progress=progress)
