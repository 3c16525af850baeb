"""Executes a plan at once: copies blocks, runs the model over the batch, samples.

For devices that do nothing by themselves. Changes no sequence.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic

import torch

from appliance.engine import batch as batches
from appliance.engine.blocks.block_moves import BlockMoves, HostMoves
from appliance.engine.rates import Rates
from appliance.model.executor import AnyCache

if TYPE_CHECKING:
    from appliance.engine.plan import Plan
    from appliance.engine.sampler import Sampled, Sampler
    from appliance.model.executor import Executor


class ModelRunner(Generic[AnyCache]):
    """Owns the KV cache and runs steps on one device.

    Args:
        executor: the model.
        cache: the blocks that it reads and writes.
        sampler: chooses tokens.
        moves: takes blocks out of the cache and puts them back; None copies them at once.
    """

    depth = 0

    def __init__(
        self,
        executor: Executor[AnyCache],
        cache: AnyCache,
        sampler: Sampler,
        moves: BlockMoves | None = None,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._sampler = sampler
        self._moves = moves or HostMoves(cache, Rates())
        self._sampled: list[Sampled] = []
        self.seconds = 0.0  # the last run, until its tokens were on the host

    def launch(self, plan: Plan) -> None:
        """Run a plan; see `Runner`."""
        self._sampled = self.run(plan)

    def collect(self) -> list[Sampled]:
        """What the plan sampled."""
        return self._sampled

    def discard(self) -> None:
        """See `Runner`: there is never anything in flight."""

    @property
    def has_idle_work(self) -> bool:
        """See `Runner`: never."""
        return False

    def idle(self) -> None:
        """See `Runner`: there is nothing to do."""

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Sampled]:
        """Run one step.

        Returns:
            One result per sampling sequence, in the plan's order.
        """
        begin = time.perf_counter()
        self._moves.save(plan.saves)
        self._moves.copy(plan.copies)
        self._moves.load(plan.loads)
        batch = batches.build(plan, self._cache.block_size, self._executor.device)
        logits = self._executor.forward(
            batch.token_ids, batch.positions, batch.ragged, self._cache, batch.sample_rows
        )
        sampled = self._sampler.sample(logits, batch.sampling) if batch.sampling else []
        self.seconds = time.perf_counter() - begin
        return sampled
