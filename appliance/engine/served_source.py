"""Opens the model that the settings name, its weights narrowed if they ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ConfigError
from appliance.model.source import open_model

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.source import ModelSource


def settings_for(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the settings without what a model cannot have, however it is executed.

    Where each sequence has a cache of a class of transformers', nothing of it is shared, kept or
    taken back.

    Raises:
        ConfigError: such a thing is asked for by name.
    """
    if source.spec.own_cache is None:
        return config
    asked = [] if config.speculate in ("auto", "off") else [f"--speculate {config.speculate}"]
    asked += ["--kv-host-memory"] if config.kv_host_memory else []
    asked += ["--state-checkpoint-memory"] if config.state_checkpoint_memory else []
    if asked:
        raise ConfigError(
            f"{asked[0]} cannot be had with {source.spec.architecture}, whose sequences have caches"
            " of its own class, which are not taken back or kept; leave it out"
        )
    return msgspec.structs.replace(config, speculate="off", prefix_caching=False, kv_host_memory=0)


def open_served(config: EngineConfig) -> ModelSource:
    """Open the model for any executor.

    Raises:
        ConfigError: its weights have no more bits than they should be rounded to.
        ModelError: as `open_model`.
    """
    source = open_model(Path(config.model), in_torch=False)
    if config.weight_bits is None:
        return source
    from appliance.model.narrowed import narrowed

    found = narrowed(source, config.weight_bits)
    if found is None:
        raise ConfigError(
            f"--weight-bits {config.weight_bits}: most weights of {config.model} have no more bits"
            " already, or their width does not divide by 32; leave it out"
        )
    return found
