"""Builds the proposer of drafts, by settings and execution."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from appliance.engine.load.draft_source import HeadDraft
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.run.cuda_graphs import MOST_ROWS
from appliance.engine.speculation.draft_blocks import DraftBlocks
from appliance.engine.speculation.draft_model import DraftModelProposer
from appliance.engine.speculation.proposal import ForcedProposer
from appliance.engine.speculation.speculator import Speculator
from appliance.engine.speculation.suffix import SuffixProposer
from appliance.errors import ConfigError
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.model.native_loader import load_linear, load_native
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.load.draft_source import DraftSource
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.memory.plan import MemoryPlan
    from appliance.engine.run.device import Device
    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.model.native import NativeDecoder

logger = logging.getLogger(__name__)


def check_speculation(config: EngineConfig, execution: Execution, device: Device) -> None:
    """Refuse a named speculation that would change answers, before anything is started.

    Raises:
        ConfigError: neither the CPU library nor a GPU executes the model.
    """
    if config.speculate in ("auto", "off") or _may_draft(execution, device):
        return
    raise ConfigError(
        f"--speculate {config.speculate} needs a GPU or the CPU library, whose answers drafts do"
        f" not change, and {execution.name} executes this model; use --speculate auto or off"
    )


def _may_draft(execution: Execution, device: Device) -> bool:
    return isinstance(execution, NativeExecution) or device.is_asynchronous


def load_speculator(
    config: EngineConfig,
    execution: Execution,
    device: Device,
    matchers: Matchers,
    plan: MemoryPlan,
    draft: DraftSource | None = None,
    target: NativeDecoder | None = None,
    kept: HiddenRows | None = None,
) -> Speculator | None:
    """Build the proposer of drafts; None if nothing drafts.

    Drafts leave answers unchanged only if a row's result does not depend, bit for bit, on other
    rows. The CPU library guarantees that. On a GPU the sums of a matmul depend on the number of
    rows, as beside other requests, and an answer may differ where two tokens are nearly equal.

    Args:
        target: the served model, for a head.
        kept: its hidden states, for a head.
    """
    if config.speculate == "off":
        return None
    if not _may_draft(execution, device):
        logger.info("no speculation: %s executes the model", execution.name)
        return None
    most = config.speculate_tokens
    if not isinstance(execution, NativeExecution):
        most = min(most, MOST_ROWS - 1)  # beyond, no graph holds the step
    asked_for = "" if config.speculate == "auto" else f"--speculate {config.speculate}"
    return Speculator(
        (ForcedProposer(matchers), SuffixProposer()),
        matchers,
        most,
        asked_for=asked_for,
        slow=None if draft is None else _load_draft(config, plan, draft, target, kept),
    )


def _load_draft(
    config: EngineConfig,
    plan: MemoryPlan,
    draft: DraftSource,
    target: NativeDecoder | None,
    kept: HiddenRows | None,
) -> DraftModelProposer:
    """Load the drafter's weights, and allocate its cache beside the served model's.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        MemoryError: the system has too little memory for the weights.
    """
    import torch

    from appliance.engine.run.draft_executor import DraftExecutor, HeadExecutor

    engine, size = draft.execution.engine, plan.block_size
    head = draft.head if isinstance(draft, HeadDraft) else None
    executor = load_native(
        draft.source,
        engine,
        draft.execution.precision.dtype,
        context_length=plan.context_length,
        target=None if head is None else target,
        shared=() if head is None else head.shared,
        join=None if head is None else head.join,
    )
    cache = executor.allocate_cache(
        draft.kv_format,
        num_blocks=plan.num_blocks + draft.num_scratch(config.max_num_seqs),
        block_size=size,
    )
    logger.info("drafts by %s, %s", draft.in_words(), executor.weight_format)
    sampling = NativeSampling(engine)
    model = DraftExecutor(executor, cache, sampling)
    if head is not None:
        assert target is not None
        assert kept is not None
        dtype = draft.execution.precision.dtype
        model = HeadExecutor(
            *(executor, target if Role.HEAD in head.shared else executor, cache, sampling, kept),
            fuse=load_linear(head.source, head.fuse, engine, dtype) if head.fuse else None,
            chains_normed=head.chains_normed,
            names=None if head.names is None else torch.from_numpy(head.names),
        )
    return DraftModelProposer(
        model,
        DraftBlocks(plan.num_blocks, size, kept),
        draft.most_tokens,
    )
