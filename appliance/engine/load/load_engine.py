"""Loads the engine for a model: one with a KV cache, or an encoder's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine.engine import LLMEngine
from appliance.engine.load.loading import load_parts
from appliance.engine.memory.admission import Admission
from appliance.engine.nouns.beacon import Beacon
from appliance.engine.run.adapters.loader import configured_adapters
from appliance.errors import ConfigError
from appliance.model.encoder.source import reads_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.encoder.encoder_engine import EncoderEngine


def load_engine(
    config: EngineConfig,
    *,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon | None = None,
    admission: Admission | None = None,
) -> LLMEngine | EncoderEngine:
    """Load a model of any kind; arguments and errors as for `load_llm_engine`."""
    if reads_only(Path(config.model)):
        if config.is_divided:
            raise ConfigError(
                f"{config.model} only reads texts, and one process runs it whole; leave out"
                " --ranks, --tensor-parallel, --pipeline-parallel and --gpu-split"
            )
        from appliance.engine.encoder.load_encoder import load_encoder_engine

        return load_encoder_engine(
            config, on_progress, beacon or Beacon(), admission or Admission()
        )
    return load_llm_engine(
        config,
        eos_token_ids=eos_token_ids,
        metadata=metadata,
        on_progress=on_progress,
        beacon=beacon,
        admission=admission,
    )


def load_llm_engine(
    config: EngineConfig,
    *,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon | None = None,
    admission: Admission | None = None,
) -> LLMEngine:
    """Plan memory, then load a model that generates.

    Args:
        config: the settings; `model` is a path.
        eos_token_ids: tokens that end an answer, or a function that returns them, called once the
            weights are read.
        metadata: memory for block metadata; None keeps it private.
        on_progress: called with stage, done, total.
        beacon: shows progress to other processes; None keeps it private.
        admission: memory shared with other models; None takes all that is free.

    Raises:
        ModelError: the model cannot be read or is not supported.
        MemoryPlanError: it does not fit.
    """
    parts = load_parts(
        config, eos_token_ids, metadata, on_progress, beacon=beacon, admission=admission
    )
    engine = LLMEngine(*parts, beacon=beacon)
    if parts.adapters is not None:
        for ref in configured_adapters(config):
            engine.install_adapter(ref)
    return engine
