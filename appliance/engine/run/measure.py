"""Runs steps before any request, to load kernels and measure memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.grammars.matchers import num_words
from appliance.engine.nouns.limits import LOGIT_ROWS
from appliance.engine.nouns.sampling_params import MAX_LOGPROBS
from appliance.engine.run.cuda_graphs import MOST_ROWS as MOST_DRAFTED
from appliance.engine.run.cuda_graphs import step_sizes
from appliance.kernels.penalties.rows import PenaltyRows
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.sampling.ranking import likeliest
from appliance.kernels.sampling.rows import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.engine.nouns.limits import SchedulerLimits
    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.kernels.operations import MaskTokens, ScoreTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.model.executor import Executor

# The number of rows selects a step's matmul kernel: each kernel serves one of these numbers or a
# larger one, see `packed_matmul.tiles`.
KERNEL_ROWS = (8, 16, 32, 64, 128, 256, 512)
# A kernel of its own routes one row, see `expert_routing.launch`; of many, each expert has few, see
# `grouped_matmul.variant`.
EXPERT_ROWS = (1, 1024, 2048, 4096)

# Of graphs, without their shared workspace: a few megabytes each, plus the libraries'.
GRAPH_SHARE = 0.02  # of the budget
MIN_GRAPH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peak bytes of steps, besides weights and cache."""

    largest: int  # over all steps
    captured: int  # over those that can be graphs


def graph_allowance(budget_bytes: int, captured_bytes: int) -> int:
    """Return the memory limit of graphs; they keep the memory of their widest step."""
    return captured_bytes + max(MIN_GRAPH_BYTES, int(budget_bytes * GRAPH_SHARE))


@torch.inference_mode()
def measure_workspace(
    executor: Executor[Any],
    sample_tokens: SampleTokens,
    penalize: Penalize,
    mask_tokens: MaskTokens,
    score_tokens: ScoreTokens,
    device: Device,
    limits: SchedulerLimits,
    *,
    kv_layers: Sequence[LayerPrecision],
    block_size: int,
) -> StepMemory:
    """Run the largest step, the largest that can be a graph, and smaller ones.

    The smaller ones load kernels that would otherwise load during an answer. All write to the one
    block of a tiny cache, and alternate between two state slots if there are any: the results are
    nonsense, the memory is real.
    """
    before = device.begin_peak()
    is_sealed = any(layer.format.is_sealed for layer in kv_layers)
    is_recurrent = executor.spec.state_bytes > 0
    cache = executor.allocate_cache(
        kv_layers,
        num_blocks=1,
        block_size=block_size,
        num_open=int(is_sealed),
        num_states=2 * is_recurrent,
    )
    tiny = device.memory_in_use() - before
    most, captured = limits.max_num_batched_tokens, 0
    widest = max(size.num_rows for size in step_sizes(limits, is_recurrent=is_recurrent))
    own = (*KERNEL_ROWS, *EXPERT_ROWS) if executor.spec.has_experts else KERNEL_ROWS
    several = {*(rows for rows in own if rows < most), limits.max_num_seqs, widest, most}
    sizes = sorted(several)

    def lay_out(
        lengths: list[int], contexts: list[int], decode_rows: int = 1
    ) -> tuple[RaggedBatch, list[int]]:
        tables = [[0] * -(-context // block_size) for context in contexts]
        opened = [
            [0] * ((context - 1) // block_size - (context - length) // block_size + 1)
            for length, context in zip(lengths, contexts, strict=True)
        ]
        batch = RaggedBatch.of(
            lengths,
            contexts,
            tables,
            block_size=block_size,
            device=device.torch_device,
            open_blocks=opened if is_sealed else None,
            decode_rows=decode_rows,
            state_slots=[number % 2 for number in range(len(lengths))] if is_recurrent else None,
        )
        if batch.sealed is not None:  # as in the runner: a place for each sequence
            nothing = torch.full_like(batch.sealed.lens, -1, dtype=torch.int64)
            moves = nothing.unsqueeze(1).expand(-1, 2).contiguous()
            batch = replace(batch, sealed=replace(batch.sealed, moves=moves))
        spans = zip(lengths, contexts, strict=True)
        return batch, [place for rows, end in spans for place in range(end - rows, end)]

    if limits.verifies and not is_recurrent:
        batch, positions = lay_out(*largest_verification(limits), MOST_DRAFTED)
        _sample(
            _run(executor.forward, batch, positions, cache, len(positions)),
            sample_tokens,
            with_logprobs=False,
        )
        del batch
    for rows in sizes:
        batch, positions = lay_out(*largest_mixture(rows, limits, is_sealed=is_sealed))
        if batch.num_decodes < rows:
            batch = replace(batch, prompts_from=batch.num_decodes)
        if rows == most:
            _read(executor, batch, positions, cache, score_tokens)
            if executor.spec.sees_pictures:
                seen = torch.tensor(positions, dtype=torch.int32, device=device.torch_device) + 1
                _run(executor.hidden, replace(batch, sees=seen), positions, cache, 1)
        logits = _run(executor.forward, batch, positions, cache, min(rows, limits.sample_rows))
        _penalize(logits, penalize)
        _mask(logits, mask_tokens)
        _sample(logits, sample_tokens, with_logprobs=rows == most)
        del batch, logits
        if rows == widest:
            captured = device.peak() - before - tiny
    largest = device.peak() - before - tiny
    del cache
    device.begin_peak()
    return StepMemory(largest, captured)


def largest_mixture(
    rows: int, limits: SchedulerLimits, *, is_sealed: bool = False
) -> tuple[list[int], list[int]]:
    """Return rows and contexts of the sequences in the step with the largest memory use.

    It has as many answers as possible, one with the whole context: tables are as wide as the
    longest one, and memory per row follows from that width. The rest are prompts. With a sealed
    cache two rows of a sequence may be in two blocks, and are laid out as two answers.
    """
    answers = min(rows, limits.max_num_seqs * (1 + is_sealed))
    whole, rest = divmod(rows - answers, limits.context_length)
    prompts = [limits.context_length] * whole + [rest] * (rest > 1)
    lengths = [1] * (answers + (rest == 1)) + prompts
    return lengths, [limits.context_length, *lengths[1:]]


def largest_verification(limits: SchedulerLimits) -> tuple[list[int], list[int]]:
    """Return rows and contexts of the sequences in the step that verifies most drafts.

    Attention keeps partial results of each row of a sequence that decodes, for the whole context.
    """
    room = min(limits.sample_rows, limits.max_num_batched_tokens)
    each = min(MOST_DRAFTED, limits.context_length)
    count = min(limits.max_num_seqs, room)
    full, rest = divmod(room - count, each - 1)
    lengths = ([each] * full + [1 + rest] + [1] * count)[:count]
    return lengths, [limits.context_length, *lengths[1:]]


def _read(
    executor: Executor[Any],
    batch: RaggedBatch,
    positions: list[int],
    cache: Any,
    score_tokens: ScoreTokens,
) -> None:
    """Run a step whose rows all belong to scored prompts."""
    hidden = _run(executor.hidden, batch, positions, cache, len(positions)).clone()
    logits = executor.logits(hidden[:LOGIT_ROWS])
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    score_tokens(logits, targets, min(MAX_LOGPROBS, executor.spec.vocab_size))


def _run(
    forward: Callable[..., Tensor],
    batch: RaggedBatch,
    positions: list[int],
    cache: Any,
    num_samples: int,
) -> Tensor:
    where = batch.query_start.device
    return forward(
        torch.zeros(len(positions), dtype=torch.int64, device=where),
        torch.tensor(positions, dtype=torch.int64, device=where),
        batch,
        cache,
        torch.arange(num_samples, device=where),
    )


def _penalize(logits: Tensor, penalize: Penalize) -> None:
    """Run the penalty kernels without changing a row."""
    num_rows, vocab_size = logits.shape
    seen = logits.new_zeros((1, vocab_size), dtype=torch.int32)
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    rows = PenaltyRows(zeros - 1, zeros, zeros.float(), zeros.double(), zeros.double())
    penalize(logits, seen, rows, zeros.long())
    penalize(logits, seen, rows, zeros.long(), is_counted=True)


def _mask(logits: Tensor, mask_tokens: MaskTokens) -> None:
    num_rows, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=logits.device)
    shape = (num_rows, num_words(vocab_size))
    mask_tokens(logits, rows, torch.full(shape, -1, dtype=torch.int32, device=logits.device))


def _sample(logits: Tensor, sample_tokens: SampleTokens, *, with_logprobs: bool) -> None:
    num_rows, vocab_size = logits.shape
    settings = SamplingRows.of(
        [1.0] * num_rows,
        [0] * num_rows,
        [0.9] * num_rows,
        [0.0] * num_rows,
        [0.5] * num_rows,
        device=logits.device,
    )
    if with_logprobs:
        logprobs = torch.log_softmax(logits, dim=-1)
        likeliest(logprobs, min(MAX_LOGPROBS, vocab_size))
    sample_tokens(logits, settings)
