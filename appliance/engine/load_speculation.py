"""Builds what proposes drafts, by the settings and by what executes the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from appliance.engine.execution.native_execution import NativeExecution
from appliance.engine.speculation.draft_blocks import DraftBlocks
from appliance.engine.speculation.draft_model import DraftModelProposer
from appliance.engine.speculation.forced import ForcedProposer
from appliance.engine.speculation.speculator import Speculator
from appliance.engine.speculation.suffix import SuffixProposer
from appliance.errors import ConfigError
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.model.native_loader import load_native

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.draft_source import DraftSource
    from appliance.engine.execution.execution import Execution
    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.memory_plan import MemoryPlan
    from appliance.engine.run.device import Device

logger = logging.getLogger(__name__)


def load_speculator(
    config: EngineConfig,
    execution: Execution,
    device: Device,
    matchers: Matchers,
    plan: MemoryPlan,
    draft: DraftSource | None = None,
) -> Speculator | None:
    """Build what proposes drafts; None if nothing does.

    Drafts change no answer where a row's result does not depend on the rows beside it, bit for bit,
    which holds for the CPU library alone.

    Raises:
        ConfigError: speculation was asked for by name where it would change answers.
    """
    if config.speculate == "off":
        return None
    if not isinstance(execution, NativeExecution) or device.is_asynchronous:
        if config.speculate != "auto":
            raise ConfigError(
                f"--speculate {config.speculate} needs the CPU library, whose answers drafts do"
                f" not change, and {execution.name} executes this model; use --speculate auto or"
                " off"
            )
        logger.info("no speculation: %s executes the model, not the CPU library", execution.name)
        return None
    asked_for = "" if config.speculate == "auto" else f"--speculate {config.speculate}"
    return Speculator(
        (ForcedProposer(matchers), SuffixProposer()),
        matchers,
        config.speculate_tokens,
        asked_for=asked_for,
        slow=None if draft is None else _load_draft(config, plan, draft),
    )


def _load_draft(config: EngineConfig, plan: MemoryPlan, draft: DraftSource) -> DraftModelProposer:
    """Read a draft model's weights, and allocate its cache beside the served model's.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        MemoryError: the system has too little memory for the weights.
    """
    from appliance.engine.run.draft_executor import DraftExecutor  # loads torch

    engine, size = draft.execution.engine, plan.block_size
    executor = load_native(
        draft.source,
        engine,
        draft.execution.precision.dtype,
        context_length=plan.context_length,
    )
    cache = executor.allocate_cache(
        draft.kv_format,
        num_blocks=plan.num_blocks + draft.num_scratch(config.max_num_seqs),
        block_size=size,
    )
    logger.info(
        "%s drafts: %s, %.0f MiB", draft.name, executor.weight_format, executor.weight_bytes / 2**20
    )
    return DraftModelProposer(
        DraftExecutor(executor, cache, NativeSampling(engine)),
        DraftBlocks(plan.num_blocks, size),
        draft.most_tokens,
    )
