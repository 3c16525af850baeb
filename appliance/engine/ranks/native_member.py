"""Another rank of the CPU library: runs the steps that rank 0 writes to shared memory.

It plans nothing, samples nothing and moves no block.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from appliance.engine.devices import native_engine
from appliance.engine.packed_models import PackedModels
from appliance.engine.ranks.messages import (
    Allocate,
    MakeSlots,
    PutAdapter,
    RankDone,
    RankFailed,
    RankJoined,
    receive_order,
    send,
)
from appliance.engine.ranks.ranked_adapters import unpack_adapter
from appliance.engine.ranks.ranks import told_division
from appliance.engine.ranks.shared_cache import map_cache, read_layers
from appliance.engine.ranks.shared_step import RankOrder, SharedStep
from appliance.engine.served_model import open_served
from appliance.kernels.arrays import numpy_dtype
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.model.native_loader import load_native
from appliance.model.shard.split import Split
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from appliance.engine.ranks.messages import Join
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.model.adapters.native_slots import NativeAdapterSlots


class NativeMember:
    """A rank's part of the model in the CPU library, and its place in the group."""

    def __init__(self, join: Join, connection: Connection, exchange: int, cache: int) -> None:
        self._threads = join.threads
        config = join.config
        self._source = open_served(config)
        engine, _ = native_engine(config, join.threads)
        division = told_division(Split(join.shares, join.is_exact), self._source, join.bounds)
        self._decoder = load_native(
            self._source,
            engine,
            numpy_dtype(join.dtype),
            context_length=join.context_length,
            part=division.parts[join.rank],
            kept=PackedModels.of(config),
        )
        release_unused()  # memory that reading the weights took
        room, size = join.room, division.split.size
        begin = group_bytes(engine.library, size, room.floats)
        num_bytes = begin + room.payload_bytes + room.answer_bytes
        self._mapping = Mapping.shared(exchange, num_bytes)
        self._exchange = SharedStep(self._mapping, begin, room)
        self._group = NativeGroup(
            engine.library,
            self._mapping.address,
            rank=join.rank,
            size=size,
            floats=room.floats,
        )
        self._work = division.work(join.rank, self._decoder, self._group, self._exchange)
        self._connection = connection
        self._cache_file = cache
        self._cache: NativeCache | None = None
        self._adapters: NativeAdapterSlots | None = None
        send(connection, RankJoined(self._decoder.weight_bytes, self._decoder.num_dense))

    def run(self) -> None:
        """Run the orders that rank 0 writes, until it ends this process or ends itself."""
        while True:
            self._group.meet()
            match self._exchange.order:
                case RankOrder.STEP:
                    with suppress(MemoryError):  # rank 0 has it too, and tells
                        self._step()
                case RankOrder.HEAD:
                    with suppress(MemoryError):
                        self._work.head(self._exchange.read_hidden())
                case RankOrder.CALL:
                    self._answer()

    def _step(self) -> None:
        assert self._cache is not None
        self._work.run(self._exchange.read_step(self._adapters), self._cache)

    def _answer(self) -> None:
        try:
            self._do()
        except MemoryError as error:
            send(self._connection, RankFailed(str(error), 5))
        else:
            send(self._connection, RankDone())

    def _do(self) -> None:
        order = receive_order(self._connection)
        match order:
            case Allocate():
                counts = (order.num_blocks, order.num_open, order.num_states)
                self._cache = self._decoder.allocate_cache(
                    read_layers(order.layers),
                    num_blocks=order.num_blocks,
                    block_size=order.block_size,
                    num_open=order.num_open,
                    num_states=order.num_states,
                    places=map_cache(self._cache_file, order.strides, order.offsets, counts),
                )
            case MakeSlots(count, _):
                self._adapters = self._make_slots(count)
            case PutAdapter(slot, content, scales):
                assert self._adapters is not None
                adapter = None if content is None else unpack_adapter(content, scales)
                self._adapters.put(
                    slot, None if adapter is None else self._adapters.lay_out(adapter)
                )
            case _:
                raise AssertionError(f"{type(order).__name__} after Join")

    def _make_slots(self, count: int) -> NativeAdapterSlots:
        """Make room for adapters, whose factors are torch's."""
        import torch

        from appliance.model.adapters.targets import adapter_targets

        torch.set_num_threads(self._threads)
        targets = adapter_targets(self._source.spec, self._source.family.names)
        return self._decoder.adapter_slots(targets, count)
