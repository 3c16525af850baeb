"""Drafting for the served model: opens a draft model or head, checks it, builds the proposer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.config import SELF_DRAFT
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.run.cuda_graphs import MOST_ROWS
from appliance.engine.run.hidden_rows import HiddenRows, kept_bytes
from appliance.engine.speculation.draft_blocks import DraftBlocks, scratch_blocks
from appliance.engine.speculation.draft_model import DraftModelProposer
from appliance.engine.speculation.proposal import ForcedProposer
from appliance.engine.speculation.speculator import Speculator
from appliance.engine.speculation.suffix import SuffixProposer
from appliance.errors import CheckpointError, ConfigError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.cache import bytes_per_token
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.model.draft_head import HeadSource, open_eagle, open_head, served_head
from appliance.model.executor import heads_of
from appliance.model.narrowed import narrowed
from appliance.model.native import NativeDecoder, why_unsupported
from appliance.model.native_loader import load_linear, load_native
from appliance.model.size import estimate_native_bytes
from appliance.model.source import open_model
from appliance.model.tensors import Role
from appliance.wording import counted

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.memory.plan import MemoryPlan, MemoryRequest
    from appliance.engine.run.device import Device
    from appliance.engine.run.draft_executor import DraftExecutor
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource


OWN_HEAD = "the checkpoint's head for multi-token prediction"
MOST_PADDING = 1024  # a head's rows without a token: sizes of one vocabulary differ by less


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model that is not loaded yet.

    Attributes:
        execution: the served model's; both share threads and workspace.
        most_tokens: the served model's vocabulary size.
        is_asked_for: by the settings; otherwise the model is served without it if need be.
    """

    name: str
    source: ModelSource
    execution: NativeExecution
    most_tokens: int
    is_asked_for: bool = True

    @property
    def kv_format(self) -> KVFormat:
        """INT8: its loss is tiny, and a draft never decides an answer."""
        return KVFormat.BF16 if self.source.spec.latent_layers else KVFormat.INT8

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in its cache, all layers."""
        library = self.execution.engine.library
        return sum(
            bytes_per_token(library, self.kv_format, heads, width)
            for heads, width in heads_of(self.source.spec)
        )

    @property
    def weight_bytes(self) -> int:
        return estimate_native_bytes(self.source, self.execution.precision.dtype)

    def in_words(self) -> str:
        """Format name, layers and the bytes of the weights."""
        layers = counted(len(self.source.spec.layers), "layer")
        return f"{self.name}: {layers}, {self.weight_bytes / 2**20:,.1f} MiB"

    def num_scratch(self, num_seqs: int) -> int:
        """Return the scratch blocks of its cache, after the served model's blocks."""
        return num_seqs * scratch_blocks(self.execution.precision.block_size)

    def hidden_rows(self, target: Executor[Any]) -> HiddenRows | None:
        """Return the keeper of the served model's hidden states; None if no drafter reads them."""
        return None

    def load(
        self,
        plan: MemoryPlan,
        max_num_seqs: int,
        target: Executor[Any],
        kept: HiddenRows | None,
    ) -> DraftModelProposer:
        """Load the drafter's weights, and allocate its cache beside the served model's.

        Args:
            target: the served model.
            kept: its hidden states, for a head.

        Raises:
            CheckpointError: a weight holds NaN or infinity.
            MemoryError: the system has too little memory for the weights.
        """
        executor = self._weights(plan.context_length, target)
        cache = executor.allocate_cache(
            self.kv_format,
            num_blocks=plan.num_blocks + self.num_scratch(max_num_seqs),
            block_size=plan.block_size,
        )
        logger.info("drafts by %s, %s", self.in_words(), executor.weight_format)
        model = self._model(executor, cache, target, kept)
        blocks = DraftBlocks(plan.num_blocks, plan.block_size, kept)
        return DraftModelProposer(model, blocks, self.most_tokens)

    def _weights(self, context_length: int, target: Executor[Any]) -> NativeDecoder:
        engine, dtype = self.execution.engine, self.execution.precision.dtype
        kept = self.execution.kept_weights(self.source.path)
        return load_native(self.source, engine, dtype, context_length=context_length, kept=kept)

    def _model(
        self,
        executor: NativeDecoder,
        cache: NativeCache,
        target: Executor[Any],
        kept: HiddenRows | None,
    ) -> DraftExecutor:
        from appliance.engine.run.draft_executor import DraftExecutor

        return DraftExecutor(executor, cache, NativeSampling(self.execution.engine))

    def added_to(self, request: MemoryRequest) -> MemoryRequest:
        """Return a memory request that includes the draft model.

        Its keys and values lie beside the served model's, block for block.
        """
        scratch = self.num_scratch(request.max_num_seqs) * request.block_size
        logits = request.max_num_seqs * self.source.spec.vocab_size * 4
        own = self.weight_bytes + scratch * self.kv_bytes_per_token + logits
        per_token = request.kv_bytes_per_token + self.kv_bytes_per_token
        return replace(request, kv_bytes_per_token=per_token, draft_bytes=own)


@dataclass(frozen=True, slots=True)
class HeadDraft(DraftSource):
    """A draft head; may share the served model's embedding and output matrix."""

    head: HeadSource = field(kw_only=True)

    @property
    def weight_bytes(self) -> int:
        dtype, shared = self.execution.precision.dtype, self.head.shared
        beside = sum(prod(slot.shape) for slot in self.head.width_slots())
        layers = estimate_native_bytes(self.source, dtype, lambda slot: slot.role not in shared)
        return layers + beside * int(dtype.itemsize)

    def in_words(self) -> str:
        """Describe it and the served model's layers that it reads."""
        reads = ", ".join(map(str, self.head.reads))
        before = f", reads the stream before layers {reads} (from 0)" if reads else ""
        return f"{DraftSource.in_words(self)}{before}"

    def hidden_rows(self, target: Executor[Any]) -> HiddenRows:
        """Return the keeper of the hidden states that the head reads."""
        assert isinstance(target, NativeDecoder)
        return HiddenRows(target, self.head.reads)

    def _weights(self, context_length: int, target: Executor[Any]) -> NativeDecoder:
        assert isinstance(target, NativeDecoder)
        return load_native(
            self.source,
            self.execution.engine,
            self.execution.precision.dtype,
            context_length=context_length,
            target=target,
            shared=self.head.shared,
            join=self.head.join,
        )

    def _model(
        self,
        executor: NativeDecoder,
        cache: NativeCache,
        target: Executor[Any],
        kept: HiddenRows | None,
    ) -> DraftExecutor:
        import torch

        from appliance.engine.run.draft_executor import HeadExecutor

        assert isinstance(target, NativeDecoder)
        assert kept is not None
        head, engine, dtype = self.head, self.execution.engine, self.execution.precision.dtype
        return HeadExecutor(
            executor,
            target if Role.HEAD in head.shared else executor,
            cache,
            NativeSampling(engine),
            kept,
            fuse=load_linear(head.source, head.fuse, engine, dtype) if head.fuse else None,
            chains_normed=head.chains_normed,
            names=None if head.names is None else torch.from_numpy(head.names),
        )

    def added_to(self, request: MemoryRequest) -> MemoryRequest:
        """Return a memory request that includes the head and the hidden states that it reads."""
        found, reads = DraftSource.added_to(self, request), self.head.reads
        width = max(1, len(reads)) * self.source.spec.hidden_size
        rows = request.max_num_batched_tokens * width * 4
        return replace(found, draft_bytes=found.draft_bytes + kept_bytes(reads) + rows)


def open_draft(
    config: EngineConfig, source: ModelSource, execution: Execution
) -> DraftSource | None:
    """Open the model or head that `--speculate` names; None if nothing drafts.

    With `auto` that is the checkpoint's head, if there is one that can draft here.

    Raises:
        ConfigError: it cannot draft for this model.
        CheckpointError: a part is missing or damaged.
        UnsupportedModelError: no code here supports it.
    """
    name, eagle = config.draft_model, config.eagle_head
    if config.speculate == "auto":
        return _own_head(config, source, execution)
    if not name and not eagle and config.speculate != "mtp":
        return None
    asked = f"--speculate {f'eagle={Path(eagle).name}' if eagle else config.speculate}"
    if not isinstance(execution, NativeExecution):
        raise ConfigError(
            f"{asked} needs the CPU library, whose answers drafts do not change, and"
            f" {execution.name} executes this model; use --speculate auto or off"
        )
    if not name:
        return _open_head(asked, source, execution, config)
    draft = narrowed(source, 4, 4) if name == SELF_DRAFT else open_model(Path(name), in_torch=False)
    if draft is None:
        raise ConfigError(
            f"{asked} drafts with the model itself at 4 bits, and its weights have no more than"
            " that already; name a smaller model, or use --speculate auto"
        )
    _check(asked, draft, source, config)
    own = "the model itself at 4 bits" if name == SELF_DRAFT else f"the model {Path(name).stem}"
    return DraftSource(own, draft, execution, source.spec.vocab_size)


def _own_head(config: EngineConfig, source: ModelSource, execution: Execution) -> HeadDraft | None:
    """Open the checkpoint's head where it can draft and nobody asked for it; else None."""
    if not isinstance(execution, NativeExecution) or config.is_divided:
        return None
    try:
        head = served_head(source)
    except (ConfigError, CheckpointError) as error:
        logger.warning("the checkpoint's head does not draft: %s", error)
        return None
    if head is None:
        return None
    if reason := why_unsupported(head.source):
        logger.warning("the checkpoint's head does not draft: %s", reason)
        return None
    most = source.spec.vocab_size
    return HeadDraft(OWN_HEAD, head.source, execution, most, is_asked_for=False, head=head)


def _open_head(
    asked: str, source: ModelSource, execution: NativeExecution, config: EngineConfig
) -> HeadDraft:
    if config.is_divided:
        raise ConfigError(
            f"{asked}: the head reads hidden states of one process, which --ranks,"
            " --tensor-parallel, --pipeline-parallel and --gpu-split divide among several; leave"
            " these out, or use --speculate auto"
        )
    most, path = source.spec.vocab_size, Path(config.eagle_head)
    if not config.eagle_head:
        head = open_head(source)
        return HeadDraft(OWN_HEAD, head.source, execution, most, head=head)
    head = open_eagle(path, source)
    known = head.source.spec.num_embedded
    if abs(known - most) > MOST_PADDING:
        raise ConfigError(
            f"{asked}: the head knows {known:,} tokens, by vocab_size and t2d, and the model"
            f" {most:,}; take a head that was made for this model"
        )
    if reason := why_unsupported(head.source):
        raise ConfigError(f"{asked}: the CPU library does not run the head: {reason}")
    return HeadDraft(f"the EAGLE-3 head {path.name}", head.source, execution, most, head=head)


def _check(asked: str, draft: ModelSource, source: ModelSource, config: EngineConfig) -> None:
    context = config.max_model_len or source.spec.context_length
    if abs(draft.spec.vocab_size - source.spec.vocab_size) > MOST_PADDING:
        raise ConfigError(
            f"{asked}: the draft model has {draft.spec.vocab_size:,} tokens and the model"
            f" {source.spec.vocab_size:,}; a draft model needs the same vocabulary, so take a"
            " smaller one of the same family"
        )
    if draft.spec.context_length < context:
        raise ConfigError(
            f"{asked}: the draft model was made for {draft.spec.context_length:,} tokens and a"
            f" context has {context:,}; take another one, or --max-model-len"
            f" {draft.spec.context_length}"
        )
    if draft.fallback is not None:
        raise ConfigError(
            f"{asked}: transformers' modules would execute the draft model, {draft.fallback.name};"
            " take one of a native family"
        )
    if draft.spec.recurrent_layers:
        raise ConfigError(
            f"{asked}: the draft model has recurrent layers, whose state cannot go back to before"
            " a rejected token; take one with attention alone"
        )
    if reason := why_unsupported(draft):
        raise ConfigError(f"{asked}: the CPU library does not run the draft model: {reason}")


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
    return execution.in_library or device.is_asynchronous


def load_speculator(
    config: EngineConfig,
    execution: Execution,
    device: Device,
    matchers: Matchers,
    plan: MemoryPlan,
    draft: DraftSource | None,
    target: Executor[Any],
    kept: HiddenRows | None,
) -> Speculator | None:
    """Build the proposer of drafts; None if nothing drafts.

    Drafts leave answers unchanged only if a row's result does not depend, bit for bit, on other
    rows. The CPU library guarantees that. On a GPU the sums of a matmul depend on the number of
    rows, as beside other requests, and an answer may differ where two tokens are nearly equal.

    Args:
        target: the served model.
        kept: its hidden states, for a head.
    """
    if config.speculate == "off":
        return None
    if not _may_draft(execution, device):
        logger.info("no speculation: %s executes the model", execution.name)
        return None
    most = config.speculate_tokens
    if not execution.in_library:
        most = min(most, MOST_ROWS - 1)  # beyond, no graph holds the step
    asked_for = "" if config.speculate == "auto" else f"--speculate {config.speculate}"
    return Speculator(
        (ForcedProposer(matchers), SuffixProposer()),
        matchers,
        most,
        asked_for=asked_for,
        slow=None if draft is None else draft.load(plan, config.max_num_seqs, target, kept),
    )
