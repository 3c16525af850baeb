"""Executes a plan: copies blocks, runs the model over the batch, samples. Changes no sequence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from appliance.engine import batch as batches

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.plan import Plan
    from appliance.engine.sampler import Sampled, Sampler
    from appliance.kernels.kv_cache import KVBlocks
    from appliance.kernels.ragged import RaggedBatch


class Executor(Protocol):
    """A loaded model, as the torch decoder is."""

    def forward(
        self,
        token_ids: Tensor,  # (num_tokens,) int64
        positions: Tensor,  # (num_tokens,) int64
        batch: RaggedBatch,
        caches: Sequences[KVBlocks],  # one per layer
        rows: Tensor | None,  # (num_rows,) int64, rows whose logits are wanted
    ) -> Tensor:
        """Run one step; returns logits (num_rows, vocab_size) float32."""
        ...


class ModelRunner:
    """Owns the KV cache and runs steps on one device.

    Args:
        executor: the model.
        caches: the blocks of every layer.
        sampler: chooses tokens.
        device: where the tensors of a step go.
    """

    def __init__(
        self,
        executor: Executor,
        caches: Sequences[KVBlocks],
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self._executor = executor
        self._caches = caches
        self._sampler = sampler
        self._device = device
        self._block_size = caches[0].block_size
        self.seconds = 0.0  # the last run, until its tokens were on the host

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Sampled]:
        """Run one step.

        Returns:
            One result per sampling sequence, in the plan's order.
        """
        begin = time.perf_counter()
        if plan.copies:
            sources = [copy.source for copy in plan.copies]
            destinations = [copy.destination for copy in plan.copies]
            for cache in self._caches:
                cache.copy_blocks(sources, destinations)
        batch = batches.build(plan, self._block_size, self._device)
        logits = self._executor.forward(
            batch.token_ids, batch.positions, batch.ragged, self._caches, batch.sample_rows
        )
        sampled = self._sampler.sample(logits, batch.sampling) if batch.sampling else []
        self.seconds = time.perf_counter() - begin
        return sampled
