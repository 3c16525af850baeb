"""Rank 0's side of the CPU library's ranks, which meet in shared memory."""

from __future__ import annotations

import contextlib
import os
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from appliance.engine.ranks.messages import Allocate
from appliance.engine.ranks.shared_cache import cache_bytes, describe_layers, map_cache
from appliance.engine.ranks.shared_step import RankOrder, SharedStep
from appliance.engine.run.moves import StateRows
from appliance.errors import EngineError
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.cache import layer_offsets
from appliance.kernels.cpu.engine import RankLostError
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.model.executor import heads_of

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.engine.nouns.moves import Rates
    from appliance.engine.ranks.messages import MakeSlots, PutAdapter, Room
    from appliance.engine.ranks.rank_group import RankGroup
    from appliance.engine.ranks.shared_step import RankStep
    from appliance.engine.run.device import Device
    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.shard import Part


class NativeRanks:
    """The other ranks, each asleep until the next step.

    Args:
        group: their processes.
        room: sizes of the memory for steps.

    Attributes:
        native: rank 0's place among the ranks.
        shared: the memory for steps.

    Raises:
        EngineError: the system is out of memory.
    """

    def __init__(self, library: ctypes.CDLL, group: RankGroup, room: Room) -> None:
        self.group = group
        begin = group_bytes(library, group.size, room.floats)
        num_bytes = begin + room.payload_bytes + room.answer_bytes
        try:
            os.ftruncate(group.exchange, 0)  # which leaves nothing of the links' tests
            os.ftruncate(group.exchange, num_bytes)
            mapping = Mapping.shared(group.exchange, num_bytes)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(f"the memory that ranks share: {reason}") from error
        self._mapping = mapping
        self.shared = SharedStep(mapping, begin, room)
        self.native = NativeGroup(
            library,
            mapping.address,
            rank=0,
            size=group.size,
            floats=room.floats,
            processes=(-1, *group.watched),
        )

    def allocate(
        self,
        own: NativeDecoder,
        parts: Sequence[Part],
        layers: Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int,
        num_states: int,
    ) -> NativeCache:
        """Allocate a cache in which a block holds one rank's part after another.

        So rank 0 saves, loads and copies blocks and states alone, between steps.

        Args:
            own: rank 0's part.
            parts: of all ranks.
            layers: their precisions, with the constants of all heads.
        """
        library = own.engine.library
        sizes = [
            (
                *layer_offsets(library, layers[part.cache_layers], heads_of(part.spec), block_size)[
                    -1
                ],
                part.spec.state_bytes,
            )
            for part in parts
        ]
        *offsets, strides = accumulate(sizes, _add, initial=(0, 0, 0))
        counts = (num_blocks, num_open, num_states)
        self.group.kv_bytes = tuple(sum(map(mul, own, counts)) for own in sizes)
        described, file = describe_layers(layers), self.group.cache
        os.ftruncate(file, 0)
        os.ftruncate(file, cache_bytes(strides, counts))
        self._call(
            [
                Allocate(described, num_blocks, block_size, num_open, num_states, strides, part)
                for part in offsets[1:]
            ]
        )
        return own.allocate_cache(
            layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
            places=map_cache(file, strides, offsets[0], counts),
        )

    def watched(self, device: Device) -> Device:
        """Return rank 0's device; the library itself watches the other ranks."""
        return device

    def state_rows(self, cache: NativeCache, device: Device, rates: Rates) -> StateRows:
        """Return the mover of a cache's rows of recurrent state."""
        return StateRows(cache.states, device, rates)

    def call(self, message: MakeSlots | PutAdapter) -> None:
        """Send all ranks one order, and wait until they have carried it out."""
        self._call([message] * (self.group.size - 1))

    @contextlib.contextmanager
    def step(self, step: RankStep) -> Iterator[None]:
        """Give a step to the other ranks while rank 0 runs its own part; wait for all of them."""
        self.group.check()
        self.shared.write_step(step)
        with self._together():
            yield

    @contextlib.contextmanager
    def head(self, hidden: Tensor) -> Iterator[None]:
        """Give rows for the head to the other ranks while rank 0 runs its own part."""
        self.group.check()
        self.shared.write_hidden(hidden)
        with self._together():
            yield

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Meet the other ranks before, and wait for them after; raise for a missing one."""
        self.group.is_interrupted = True
        try:
            self.native.meet()
            yield
            self.native.wait()
        except MemoryError:  # in all ranks, which go on
            self.native.wait()
            self.group.is_interrupted = False
            raise
        except RankLostError as error:
            raise EngineError(self.group.lost()) from error
        self.group.is_interrupted = False

    def _call(self, messages: Sequence[Allocate | MakeSlots | PutAdapter]) -> None:
        self.group.check()
        try:
            self.native.wait()
            self.shared.write_order(RankOrder.CALL)
            self.native.meet()  # from here on they read, so that no message is too long to send
            self.group.send(messages)
            self.group.answers()
            self.native.wait()
        except RankLostError as error:
            raise EngineError(self.group.lost()) from error


def _add(one: tuple[int, int, int], two: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]
