"""Divides a model into stages of whole layers, and runs a stage's part of a step.

The stages pass micro-batches on to the next rank. A row's result depends neither on the rows beside
it nor on how its prompt is cut, so any cut is valid. Every stage runs the micro-batches in order,
so a row reads what earlier rows wrote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.shares import LEAST_GAIN
from appliance.kernels import arrays
from appliance.kernels.cpu.cache import bytes_per_token
from appliance.kernels.cpu.structs import Status
from appliance.kernels.rows.ragged import SealedSpans
from appliance.model.shard.stage import Stage, check_stages, cut_layers, run_bytes
from appliance.model.size import native_slot_bytes
from appliance.model.tensors import Role

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.ranks.division import RankWork
    from appliance.engine.ranks.shared_step import RankStep, SharedStep
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot


# The time of a row's arithmetic over that of reading all weights: 0.4 with SmolLM2-135M on a CPU,
# 0.1 with a model of 0.5B.
ROW_COST = 0.25


@dataclass(frozen=True, slots=True)
class Stages:
    """Each rank has a run of whole layers; see `Division`.

    Attributes:
        stage_bytes: of each rank, with the keys and values of one whole context.
    """

    split: Split
    parts: tuple[Stage, ...]
    stage_bytes: tuple[float, ...]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        source: ModelSource,
        split: Split,
        precision: Precision,
        library: ctypes.CDLL,
        rates: Sequence[float] = (),
    ) -> Stages:
        """Divide a model.

        Args:
            rates: bytes per second of each rank, to divide by if the slowest one gains enough;
                otherwise bytes are divided by the shares.

        Raises:
            ConfigError: it has too few layers, or layers that need other layers' inputs.
        """
        spec = source.spec
        check_stages(spec, split.size)
        sizes, first, last = _layer_bytes(config, source, precision, library)
        bounds = cut_layers(sizes, split.shares, first, last)
        if rates:

            def slowest(bounds: tuple[int, ...]) -> float:
                runs = run_bytes(sizes, bounds, first, last)
                return max(run / rate for run, rate in zip(runs, rates, strict=True))

            by_rate = cut_layers(sizes, rates, first, last)
            if slowest(by_rate) < (1 - LEAST_GAIN) * slowest(bounds):
                bounds = by_rate
        stages = tuple(Stage.of(spec, bounds, rank) for rank in range(split.size))
        return cls(split, stages, run_bytes(sizes, bounds, first, last))

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.parts[0].bounds

    def in_words(self) -> str:
        return f"{self.split.size} stages from layers {', '.join(map(str, self.bounds[:-1]))}"

    def notes(self) -> tuple[str, ...]:
        runs = [
            f"{_run_in_words(*stage.layers)} ({num_bytes / 2**20:,.1f} MiB)"
            for stage, num_bytes in zip(self.parts, self.stage_bytes, strict=True)
        ]
        return (
            f"{self.split.size} processes run the model's layers in turn, with their keys and"
            f" values of one context: {', '.join(runs)}",
        )

    def copies(self, slot: TensorSlot) -> float:
        is_tied = self.parts[0].whole.tied_head and slot.role is Role.EMBEDDING
        return 2 if is_tied else 1

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return (spec,)

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """An exchange holds all rows of the largest step, and the last rank's results."""
        rows, spec = config.max_num_batched_tokens, self.parts[0].whole
        answers = 4 * rows * max(spec.hidden_size, spec.vocab_size)
        return Room(rows * spec.hidden_size, payload_bytes, answers)

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
        return PipelineWork(own, self.parts[rank], group, at)


def _layer_bytes(
    config: EngineConfig, source: ModelSource, precision: Precision, library: ctypes.CDLL
) -> tuple[list[float], float, float]:
    """Return the bytes of each layer, and the extra bytes of the first and the last rank.

    A layer holds its weights, the keys and values of one whole context, and all sequences'
    states.
    """
    spec, dtype = source.spec, precision.dtype
    sizes, first, last = [0.0] * len(spec.layers), 0.0, 0.0
    for slot in source.slots():
        num_bytes = native_slot_bytes(source, slot, dtype)
        if slot.layer is not None:
            sizes[slot.layer] += num_bytes
        elif slot.role in (Role.HEAD, Role.NORM):
            last += num_bytes
        else:
            first += num_bytes
            last += num_bytes * (spec.tied_head and slot.role is Role.EMBEDDING)
    tokens = config.max_model_len or spec.context_length
    layers = precision.kv_layers
    for (index, mixer), layer in zip(spec.cache_layers.items(), layers, strict=True):
        heads = mixer.num_kv_heads, mixer.head_dim
        sizes[index] += tokens * bytes_per_token(library, layer.format, *heads)
    for index in spec.recurrent_layers:
        own = Stage.of(spec, (index, index + 1), 0).spec
        sizes[index] += config.max_num_seqs * own.state_bytes
    return sizes, first, last


def _run_in_words(first: int, last: int) -> str:
    return f"layer {first}" if last == first + 1 else f"layers {first} to {last - 1}"


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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a step.

    Attributes:
        step: of these rows alone.
        places: of its results among the step's.
        begin: its first result among those of all micro-batches in turn.
    """

    step: RankStep
    places: NDArray[np.int64]
    begin: int


def micro_batch_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Return the first row of each micro-batch, then the number of rows.

    Of m micro-batches a stage idles (size - 1) / (m + size - 1) of the turns, but each reads all
    of a stage's weights. m is what makes m + size - 1 turns of 1 + ROW_COST * num_rows / m the
    shortest.
    """
    best = round(math.sqrt((size - 1) * num_rows * ROW_COST))
    count = min(num_rows, max(1, best))
    return tuple(num_rows * number // count for number in range(count + 1))


def turns(count: int, size: int) -> list[tuple[int | None, ...]]:
    """Return the micro-batch that each stage runs in each turn; None if it idles."""
    return [
        tuple(turn - rank if 0 <= turn - rank < count else None for rank in range(size))
        for turn in range(count + size - 1)
    ]


def cut_step(step: RankStep, bounds: Sequence[int]) -> list[MicroBatch]:
    """Cut a step at these rows."""
    num_rows = len(step.token_ids)
    wanted = np.arange(num_rows) if step.rows is None else np.asarray(step.rows.numpy())
    found, begin = [], 0
    for first, last in pairwise(bounds):
        places = np.flatnonzero((first <= wanted) & (wanted < last))
        found.append(MicroBatch(_cut(step, first, last, wanted[places] - first), places, begin))
        begin += len(places)
    return found


def _cut(step: RankStep, first: int, last: int, rows: NDArray[np.int64]) -> RankStep:
    return replace(
        step,
        token_ids=step.token_ids[first:last],
        positions=step.positions[first:last],
        batch=_cut_batch(step.batch, first, last),
        rows=arrays.of_numpy(rows),
    )


def _cut_batch(batch: RaggedBatch, first: int, last: int) -> RaggedBatch:
    """Return the sequences with rows in a range; the last context ends with its last row."""
    starts = np.asarray(batch.query_start.numpy())
    begin = int(np.searchsorted(starts, first, side="right")) - 1
    end = int(np.searchsorted(starts, last, side="left"))
    own = slice(begin, end)
    contexts = batch.context_lens[own].clone()
    contexts[-1] -= max(int(starts[end]) - last, 0)
    sealed, adapters = batch.sealed, batch.adapters
    unused = (0,) * (end - begin)  # only torch's executor reads what the host knows
    return replace(
        batch,
        query_start=arrays.of_numpy(np.clip(starts[begin : end + 1], first, last) - first),
        context_lens=contexts,
        block_tables=batch.block_tables[own],
        slot_mapping=batch.slot_mapping[first:last],
        host_query_lens=unused,
        host_context_lens=unused,
        sealed=None if sealed is None else SealedSpans(contexts, sealed.open_tables[own], (), ()),
        state_slots=None if batch.state_slots is None else batch.state_slots[own],
        adapters=None if adapters is None else replace(adapters, slots=adapters.slots[own]),
    )
