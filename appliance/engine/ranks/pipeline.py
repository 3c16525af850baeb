"""A stage's part of a step: whole layers, which pass micro-batches on to the next rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.engine.ranks.micro_batches import cut_step, micro_batch_bounds, turns
from appliance.kernels import arrays
from appliance.kernels.cpu.structs import Status

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.ranks.micro_batches import MicroBatch
    from appliance.engine.ranks.shared_step import RankStep, SharedStep
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.stage import Stage


class PipelineWork:
    """One stage; see `RankWork`.

    While a stage runs one micro-batch, the stage before it runs the next. All stages meet after
    each turn; in the next one, a stage reads the slot that the stage before it wrote.

    Args:
        decoder: its layers.
        shared: the last stage writes its results here.
    """

    def __init__(
        self, decoder: NativeDecoder, stage: Stage, group: NativeGroup, shared: SharedStep
    ) -> None:
        self._decoder = decoder
        self._stage = stage
        self._group = group
        self._shared = shared

    def run(self, step: RankStep, cache: NativeCache) -> Tensor | None:
        """Run this stage's part of a step; the first stage returns the last one's results.

        Raises:
            MemoryError: a stage lacks workspace; all stages raise it before any of them begins,
                so the step can be repeated.
            RankLostError: a rank has ended.
        """
        parts = cut_step(step, micro_batch_bounds(len(step.token_ids), self._stage.size))
        self._make_room(parts, cache)
        for turn in turns(len(parts), self._stage.size):
            number = turn[self._stage.rank]
            if number is not None:
                self._run(parts[number], cache)
            self._group.exchange()
        if not self._stage.is_first:
            return None
        width = self._width(step)
        num_answers = sum(len(part.places) for part in parts)
        found = self._shared.answers(0, num_answers, width).numpy()
        answers: Tensor = arrays.empty((num_answers, width), "float32", step.token_ids)
        for part in parts:
            answers.numpy()[part.places] = found[part.begin : part.begin + len(part.places)]
        return answers

    def head(self, hidden: Tensor) -> Tensor | None:
        """Run the head in the last stage; the first one returns its results.

        Raises:
            MemoryError: the last stage lacks workspace.
            RankLostError: a rank has ended.
        """
        width, status = self._stage.whole.vocab_size, Status.OK
        if self._stage.is_last:
            try:
                self._decoder.logits(hidden, self._shared.answers(0, len(hidden), width))
            except MemoryError:
                status = Status.NO_MEMORY
        self._group.exchange(status)
        if not self._stage.is_first:
            return None
        logits: Tensor = arrays.empty((len(hidden), width), "float32", hidden)
        logits.numpy()[:] = self._shared.answers(0, len(hidden), width).numpy()
        return logits

    def _make_room(self, parts: list[MicroBatch], cache: NativeCache) -> None:
        """Allocate the workspace of all micro-batches in all stages, or in none."""
        status = Status.OK
        try:
            for part in parts:
                self._run(part, cache, runs=False)
        except MemoryError:
            status = Status.NO_MEMORY
        self._group.exchange(status)

    def _run(self, part: MicroBatch, cache: NativeCache, *, runs: bool = True) -> None:
        stage, step = self._stage, part.step
        shape = len(step.token_ids), stage.whole.hidden_size
        places: dict[str, Any] = {}
        if not stage.is_first:
            places["given"] = self._group.slot(stage.rank - 1, shape, is_before=True)
        if stage.is_last:
            wanted = "logits" if step.wants_logits else "hidden"
            places[wanted] = self._shared.answers(part.begin, len(part.places), self._width(step))
        else:
            places["streams"] = self._group.slot(stage.rank, shape)
        self._decoder.step_into(
            step.token_ids,
            step.positions,
            step.batch,
            cache,
            step.rows if stage.is_last else None,
            **places,
            runs=runs,
        )

    def _width(self, step: RankStep) -> int:
        spec = self._stage.whole
        return spec.vocab_size if step.wants_logits else spec.hidden_size
