"""Divides a model among ranks, and starts their processes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from appliance.engine.packed_models import PackedModels
from appliance.engine.ranks.division import DividedLayers
from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.native_ranks import NativeRanks
from appliance.engine.ranks.pipeline import Stages
from appliance.engine.ranks.ranked_decoder import RankedDecoder
from appliance.engine.ranks.shared_step import payload_bytes
from appliance.engine.run.adapters.loader import wants_adapters
from appliance.errors import ConfigError
from appliance.kernels.cpu.library import load_library
from appliance.model.native_loader import load_native
from appliance.model.shard.split import Split
from appliance.model.shard.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.ranks.division import Division
    from appliance.engine.ranks.rank_group import RankGroup
    from appliance.engine.ranks.started import StartedRanks
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.decoder import Decoder
    from appliance.model.shard.joint import JoinedShard
    from appliance.model.source import ModelSource

# Resident memory of a process with Python and NumPy and no model, beside what it shares.
MEMBER_BYTES = 60 << 20
TORCH_BYTES = 200 << 20  # which a rank loads to read adapters
SMALLEST_BLOCK = 16  # token slots


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one model.

    Attributes:
        config: the settings, which every rank reads.
        threads: of each rank.
        division: the parts.
        started: the other processes and their measurements; None before they start.
    """

    config: EngineConfig
    threads: tuple[int, ...]
    division: Division
    started: StartedRanks | None = None

    @classmethod
    def of(
        cls, config: EngineConfig, source: ModelSource, precision: Precision, threads: int
    ) -> Ranks | None:
        """Divide a model by the settings; None if one process holds all of it.

        Args:
            threads: of all ranks together, at least one each.

        Raises:
            ConfigError: the shares are invalid, or the model does not divide by them.
        """
        if not config.is_divided:
            return None
        if config.num_ranks == 1:
            raise ConfigError(
                f"--gpu-split {config.gpu_split} divides the model among several processes;"
                " say how many with --ranks"
            )
        split = Split.parse(config.num_ranks, config.gpu_split)
        division: Division
        if config.pipeline_parallel > 1:
            division = Stages.of(config, source, split, precision, load_library())
        else:
            division = DividedLayers.of(source, split)
        bounds = split.cut(max(threads, split.size))
        assert bounds is not None
        counts = tuple(last - first for first, last in pairwise(bounds))
        return cls(config, counts, division)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.division.split.size

    def notes(self) -> tuple[str, ...]:
        """Describe the division and the measurements."""
        notes, started = self.division.notes(), self.started
        if started is None:
            return notes
        if self.config.ranks > 1 and started.why_shares:
            notes += (f"each rank has a share of every layer, since {started.why_shares}",)
        return notes + started.notes()

    def taken_bytes(self, *, in_torch: bool) -> int:
        """Return the memory that the processes already take, as a plan counts it."""
        each = MEMBER_BYTES + in_torch * TORCH_BYTES
        return 0 if self.started is None else (self.size - 1) * each

    def process_bytes(self, source: ModelSource, *, in_torch: bool) -> int:
        """Return the host memory of exchanges, and of the other processes without their parts."""
        if in_torch:
            return (self.size - 1) * (MEMBER_BYTES + TORCH_BYTES)
        rows, room = self.config.max_num_batched_tokens, self.division.room(self.config, 0)
        exchange = 2 * self.size * 4 * room.floats
        if room.answer_bytes:
            exchange += 4 * self.config.max_num_seqs * source.spec.vocab_size
        each = MEMBER_BYTES + (TORCH_BYTES if wants_adapters(self.config) else 0)
        return (self.size - 1) * each + exchange + 64 * rows

    def load_native(
        self,
        source: ModelSource,
        engine: NativeEngine,
        dtype: Any,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
    ) -> RankedDecoder:
        """Load all parts at the same time, with the other ranks started.

        Raises:
            EngineError: a rank could not load its part, or shared memory is lacking.
        """
        assert self.started is not None
        rows, width = self.config.max_num_batched_tokens, source.spec.hidden_size
        payload = payload_bytes(rows, -(-context_length // SMALLEST_BLOCK), width)
        room = self.division.room(self.config, payload)
        with _closed_if_it_fails(self.started.group) as group:
            link = NativeRanks(engine.library, group, room)
            group.load(*self._given(dtype, context_length), room)
            own = load_native(
                source,
                engine,
                dtype,
                on_progress,
                context_length=context_length,
                part=self.division.parts[0],
                kept=PackedModels.of(self.config),
            )
            group.join()
        work = self.division.work(0, own, link.native, link.shared)
        return RankedDecoder(
            source.spec, self.division, self.threads, own, work, link, self.started
        )

    def load_torch(
        self,
        source: ModelSource,
        device: torch.device,
        dtype: torch.dtype,
        context_length: int,
        load_own: Callable[[JoinedShard], Decoder],
    ) -> RankedDecoder:
        """Load all parts of the torch decoder at the same time, with the other ranks started.

        Args:
            device: rank 0's.
            load_own: loads rank 0's part.

        Raises:
            EngineError: a rank could not load its part, or could not reach the others.
        """
        from appliance.engine.ranks.torch_ranks import TorchRanks, TorchWork
        from appliance.model.shard.joint import JoinedShard

        division, started = self.division, self.started
        assert isinstance(division, DividedLayers)
        assert started is not None
        link = TorchRanks(started.group, device)
        given = self._given(dtype, context_length)
        with _closed_if_it_fails(started.group) as group:
            group.load(*given, Room(floats=0, payload_bytes=0), device=device.type)
            own = load_own(JoinedShard(division.parts[0], link.joint))
            group.join()
            link.connect()
        work = TorchWork(own)
        return RankedDecoder(source.spec, division, self.threads, own, work, link, started)

    def _given(
        self, dtype: Any, context_length: int
    ) -> tuple[EngineConfig, Split, Any, tuple[int, ...], tuple[int, ...], int]:
        """Return the message of `RankGroup.load`, without the rank's number."""
        division = self.division
        return self.config, division.split, dtype, self.threads, division.bounds, context_length


@contextmanager
def _closed_if_it_fails(group: RankGroup) -> Iterator[RankGroup]:
    try:
        yield group
    except BaseException:
        group.close()
        raise


def told_division(split: Split, source: ModelSource, bounds: tuple[int, ...]) -> Division:
    """Return rank 0's division; `bounds` are those of its stages, if any."""
    if not bounds:
        return DividedLayers.of(source, split)
    stages = tuple(Stage.of(source.spec, bounds, rank) for rank in range(split.size))
    return Stages(split, stages, stage_bytes=())
