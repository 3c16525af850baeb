"""How much memory the largest step takes on a device: it is run, and the peak is read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.sampling import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.device.device import Device
    from appliance.engine.device.device_sampler import SampleTokens
    from appliance.engine.scheduling.scheduler import SchedulerLimits
    from appliance.kernels.kv_cache import LayerPrecision
    from appliance.model.executor import Executor

logger = logging.getLogger(__name__)

# Graphs keep the workspace of the widest decode step, and a few megabytes for each of them.
GRAPH_SHARE = 0.02  # of the budget
MIN_GRAPH_BYTES = 256 * 2**20


def graph_allowance(budget_bytes: int) -> int:
    """Bytes that graphs may take."""
    return max(MIN_GRAPH_BYTES, int(budget_bytes * GRAPH_SHARE))


@torch.inference_mode()
def measure_workspace(
    executor: Executor[Any],
    sample_tokens: SampleTokens,
    device: Device,
    limits: SchedulerLimits,
    *,
    kv_layers: Sequence[LayerPrecision],
    block_size: int,
) -> int:
    """Bytes that the largest step takes at its peak, beside the weights and the cache.

    As many prompt tokens as a step can have, and as many sequences sampled from as there can be,
    with log probabilities. All write to the one block of a tiny cache: what comes out is nonsense,
    what it takes is not.
    """
    before = device.begin_peak()
    is_sealed = any(layer.format.is_sealed for layer in kv_layers)
    cache = executor.allocate_cache(
        kv_layers, num_blocks=1, block_size=block_size, num_open=int(is_sealed)
    )
    tiny = device.memory_in_use() - before
    where = device.torch_device
    rows = limits.max_num_batched_tokens
    longest = min(rows, limits.context_length)
    lengths = [longest] * (rows // longest) + [rows % longest] * (rows % longest > 0)
    lengths.sort(key=lambda length: length > 1)  # those with a single row first
    batch = RaggedBatch.of(
        lengths,
        lengths,
        [[0] * -(-length // block_size) for length in lengths],
        block_size=block_size,
        device=where,
        open_pages=[[0] * -(-length // block_size) for length in lengths] if is_sealed else None,
    )
    token_ids = torch.zeros(rows, dtype=torch.int64, device=where)
    positions = torch.cat([torch.arange(length, device=where) for length in lengths])
    num_samples = limits.max_num_seqs
    logits = executor.forward(
        token_ids, positions, batch, cache, torch.arange(num_samples, device=where)
    )
    settings = SamplingRows.of(
        [1.0] * num_samples,
        [0] * num_samples,
        [0.9] * num_samples,
        [0.0] * num_samples,
        [0.5] * num_samples,
        device=where,
    )
    logprobs = torch.log_softmax(logits, dim=-1)
    sample_tokens(logits, settings)
    peak = device.peak() - before - tiny
    del cache, logits, logprobs
    device.begin_peak()
    logger.info("a step of %d rows takes %.0f MiB at its peak", rows, peak / 2**20)
    return peak
