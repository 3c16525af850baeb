"""Rank 0's side of a group: starts the other ranks, and gives each step to all of them."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

from appliance.engine.ranks.messages import (
    Allocate,
    Join,
    MakeSlots,
    RankFailed,
    RankJoined,
    receive_answer,
    send,
)
from appliance.engine.ranks.rank_process import RankProcess
from appliance.engine.ranks.shared_cache import cache_bytes, describe_layers, map_cache
from appliance.engine.ranks.shared_step import RankOrder, SharedStep
from appliance.errors import EngineError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.engine import RankLostError
from appliance.kernels.cpu.group import NativeGroup, group_bytes

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.config import EngineConfig
    from appliance.engine.ranks.messages import FromRank, PutAdapter, Room
    from appliance.engine.ranks.shared_step import RankStep
    from appliance.kernels.cpu.cache import CachePlaces
    from appliance.kernels.kv_format import LayerPrecision


class RankGroup:
    """The other ranks of a model, each a process that ends with this one.

    A rank waits for the next step asleep. One that ends takes all of them along: whatever is asked
    next fails.

    Args:
        asked: the setting that asks for it.
        room: of the memory for steps.

    Attributes:
        native: rank 0's place among the ranks.
        shared: the memory for steps.

    Raises:
        EngineError: the system is out of processes, descriptors or memory.
    """

    def __init__(self, library: ctypes.CDLL, asked: str, size: int, room: Room) -> None:
        self.size = size
        self.weight_bytes: tuple[int, ...] = ()
        self.num_dense = 0
        self._room = room
        begin = group_bytes(library, size, room.floats)
        num_bytes = begin + room.payload_bytes + room.answer_bytes
        self._members: list[RankProcess] = []
        files: list[int] = []
        self._end = weakref.finalize(self, _end, self._members, files)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            try:
                exchange = os.memfd_create("appliance-ranks", os.MFD_CLOEXEC)
                undo.callback(os.close, exchange)
                self._cache = os.memfd_create("appliance-ranks-cache", os.MFD_CLOEXEC)
                files.append(self._cache)
                os.ftruncate(exchange, num_bytes)
                mapping = Mapping.shared(exchange, num_bytes)
                for rank in range(1, size):
                    self._members.append(RankProcess(rank, exchange, self._cache))
            except (OSError, MemoryError) as error:
                reason = getattr(error, "strerror", None) or error
                raise EngineError(f"the processes of {asked}: {reason}") from error
            self._mapping = mapping
            undo.pop_all()
        os.close(exchange)
        self.shared = SharedStep(mapping, begin, room)
        self.native = NativeGroup(
            library,
            mapping.address,
            rank=0,
            size=size,
            floats=room.floats,
            processes=(-1, *(member.watched for member in self._members)),
        )
        self._interrupted = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the other ranks."""
        return tuple(member.process.pid for member in self._members)

    def load(
        self,
        config: EngineConfig,
        dtype: Any,
        threads: Sequence[int],
        bounds: tuple[int, ...],
        context_length: int,
    ) -> None:
        """Tell the ranks to load their parts; `join` waits for them."""
        for member, count in zip(self._members, threads[1:], strict=True):
            join = Join(
                config,
                dtype_name(dtype),
                rank=member.rank,
                threads=count,
                bounds=bounds,
                room=self._room,
                context_length=context_length,
            )
            send(member.connection, join)

    def join(self) -> None:
        """Wait until all ranks have loaded their parts.

        Raises:
            EngineError: one could not.
        """
        answers = [self._answer(member) for member in self._members]
        joined = [answer for answer in answers if isinstance(answer, RankJoined)]
        self.weight_bytes = tuple(answer.weight_bytes for answer in joined)
        self.num_dense = sum(answer.num_dense for answer in joined)

    def allocate(
        self,
        layers: Sequence[LayerPrecision],
        strides: tuple[int, int, int],
        offsets: Sequence[tuple[int, int, int]],
        counts: tuple[int, int, int],
        block_size: int,
    ) -> CachePlaces:
        """Map a cache of zeros in all ranks; return rank 0's part."""
        described = describe_layers(layers)
        os.ftruncate(self._cache, 0)
        os.ftruncate(self._cache, cache_bytes(strides, counts))
        num_blocks, num_open, num_states = counts
        self._call(
            [
                Allocate(described, strides, own, num_blocks, block_size, num_open, num_states)
                for own in offsets[1:]
            ]
        )
        return map_cache(self._cache, strides, offsets[0], counts)

    def make_slots(self, count: int) -> None:
        """Make room for adapters."""
        self._call([MakeSlots(count)] * len(self._members))

    def call(self, message: PutAdapter) -> None:
        """Tell all ranks the same, and wait until they have done it."""
        self._call([message] * len(self._members))

    @contextlib.contextmanager
    def step(self, step: RankStep) -> Iterator[None]:
        """Give a step to the other ranks while rank 0 runs its own part; wait for all of them."""
        self._check()
        self.shared.write_step(step)
        with self._together():
            yield

    @contextlib.contextmanager
    def head(self, hidden: Tensor) -> Iterator[None]:
        """Give rows for the head to the other ranks while rank 0 runs its own part."""
        self._check()
        self.shared.write_hidden(hidden)
        with self._together():
            yield

    def close(self) -> None:
        """End the other ranks."""
        self._end()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Meet the other ranks before, and wait for them after; raise for a missing one."""
        self._interrupted = True
        try:
            self.native.meet()
            yield
            self.native.wait()
        except MemoryError:  # in all ranks, which go on
            self.native.wait()
            self._interrupted = False
            raise
        except RankLostError as error:
            raise EngineError(self._lost()) from error
        self._interrupted = False

    def _check(self) -> None:
        if self._interrupted:
            raise EngineError("a step of several ranks was interrupted; load the model again")

    def _call(self, messages: Sequence[Allocate | MakeSlots | PutAdapter]) -> None:
        self._check()
        try:
            self.native.wait()
            self.shared.write_order(RankOrder.CALL)
            self.native.meet()  # from here on they read, so that no message is too long to send
            for member, message in zip(self._members, messages, strict=True):
                send(member.connection, message)
            for member in self._members:
                self._answer(member)
            self.native.wait()
        except (RankLostError, OSError) as error:
            raise EngineError(self._lost()) from error

    def _answer(self, member: RankProcess) -> FromRank:
        try:
            answer = receive_answer(member.connection)
        except (EOFError, OSError) as error:
            raise EngineError(self._lost()) from error
        if isinstance(answer, RankFailed):
            raise EngineError(f"rank {member.rank}: {answer.reason}")
        return answer

    def _lost(self) -> str:
        """Say which rank has ended, and how."""
        for member in self._members:
            if (how := member.how_ended()) is not None:
                return how
        return "a rank of the model does not answer"


def _end(members: list[RankProcess], files: list[int]) -> None:
    for member in members:
        member.end()
    members.clear()
    while files:
        os.close(files.pop())
