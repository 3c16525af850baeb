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
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.config import EngineConfig
    from appliance.engine.ranks.messages import FromRank, PutAdapter
    from appliance.kernels.cpu.cache import CachePlaces
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.kv_format import LayerPrecision
    from appliance.kernels.ragged import RaggedBatch


class RankGroup:
    """The other ranks of a model, each a process that ends with this one.

    A rank waits for the next step asleep. One that ends takes all of them along: whatever is asked
    next fails.

    Args:
        engine: rank 0's.
        floats: numbers that a rank gives in one exchange.
        payload_bytes: room for the description of a step.

    Raises:
        EngineError: the system is out of processes, descriptors or memory.
    """

    def __init__(self, engine: NativeEngine, size: int, floats: int, payload_bytes: int) -> None:
        self.size = size
        self.weight_bytes: tuple[int, ...] = ()
        self.num_dense = 0
        self._floats, self._payload_bytes = floats, payload_bytes
        shared = group_bytes(engine.library, size, floats)
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
                os.ftruncate(exchange, shared + payload_bytes)
                mapping = Mapping.shared(exchange, shared + payload_bytes)
                for rank in range(1, size):
                    self._members.append(RankProcess(rank, exchange, self._cache))
            except (OSError, MemoryError) as error:
                reason = getattr(error, "strerror", None) or error
                raise EngineError(f"the processes of --tensor-parallel: {reason}") from error
            self._mapping = mapping
            undo.pop_all()
        os.close(exchange)
        self._exchange = SharedStep(mapping, shared, payload_bytes)
        self._group = NativeGroup(
            engine.library,
            mapping.address,
            rank=0,
            size=size,
            floats=floats,
            processes=(-1, *(member.watched for member in self._members)),
        )
        self._engine = engine
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
        context_length: int,
    ) -> None:
        """Tell the ranks to load their parts; `join` waits for them."""
        for member, count in zip(self._members, threads[1:], strict=True):
            join = Join(
                config,
                dtype_name(dtype),
                rank=member.rank,
                threads=count,
                floats=self._floats,
                payload_bytes=self._payload_bytes,
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
    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        rows: Tensor | None,
        *,
        wants_logits: bool,
    ) -> Iterator[None]:
        """Give a step to the other ranks while rank 0 runs its own part; wait for all of them."""
        self._check()
        self._exchange.write_step(token_ids, positions, batch, rows, wants_logits=wants_logits)
        with self._together():
            yield

    @contextlib.contextmanager
    def head(self, hidden: Tensor) -> Iterator[None]:
        """Give rows for the head to the other ranks while rank 0 runs its own part."""
        self._check()
        self._exchange.write_hidden(hidden)
        with self._together():
            yield

    def close(self) -> None:
        """End the other ranks."""
        self._end()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Meet the other ranks before, and wait for them after; raise for a missing one.

        Between two steps the engine may run other models, which rank 0 has alone.
        """
        self._interrupted = True
        try:
            self._group.meet()
            self._engine.join(self._group.handle)
            try:
                yield
            finally:
                self._engine.join(None)
            self._group.wait()
        except MemoryError:  # in all ranks, which go on
            self._group.wait()
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
            self._group.wait()
            self._exchange.write_order(RankOrder.CALL)
            self._group.meet()  # from here on they read, so that no message is too long to send
            for member, message in zip(self._members, messages, strict=True):
                send(member.connection, message)
            for member in self._members:
                self._answer(member)
            self._group.wait()
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
