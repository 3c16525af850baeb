"""Opens the model that the settings name, its weights narrowed if they ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.model.source import open_model

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.source import ModelSource


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
