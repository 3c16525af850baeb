"""Loads the engine for a model: one with a KV cache, or an encoder's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine.admission import Admission
from appliance.engine.beacon import Beacon
from appliance.engine.engine import LLMEngine
from appliance.errors import ConfigError
from appliance.model.encoder.source import reads_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.encoder_engine import EncoderEngine


def load_engine(
    config: EngineConfig,
    *,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon | None = None,
    admission: Admission | None = None,
) -> LLMEngine | EncoderEngine:
    """Load a model of any kind; arguments and errors as for `LLMEngine.load`."""
    if reads_only(Path(config.model)):
        if config.is_divided:
            raise ConfigError(
                f"{config.model} only reads texts, and one process runs it whole; leave out"
                " --ranks, --tensor-parallel, --pipeline-parallel and --gpu-split"
            )
        from appliance.engine.load_encoder import load_encoder_engine

        return load_encoder_engine(
            config, on_progress, beacon or Beacon(), admission or Admission()
        )
    return LLMEngine.load(
        config,
        eos_token_ids=eos_token_ids,
        metadata=metadata,
        on_progress=on_progress,
        beacon=beacon,
        admission=admission,
    )
