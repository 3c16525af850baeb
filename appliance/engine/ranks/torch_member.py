"""Another rank of the torch decoder: carries out rank 0's orders on its own device.

It plans nothing and samples nothing. A failure ends the process, which rank 0 notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch
from msgspec.json import decode, encode

from appliance.engine.devices import backend_of
from appliance.engine.ranks.messages import (
    Allocate,
    CaptureStep,
    CopyBlocks,
    CopyStates,
    KernelsTimed,
    LoadBlock,
    LoadState,
    MakeSlots,
    PutAdapter,
    RankAllocated,
    RankCaptured,
    RankDone,
    RankJoined,
    ReplayStep,
    RunHead,
    RunStep,
    SaveBlock,
    SaveState,
    TimeKernels,
    ToNewRank,
    UseTimed,
    receive_order,
    send,
)
from appliance.engine.ranks.ranked_adapters import unpack_adapter
from appliance.engine.ranks.ranked_cache import read_window, write_window
from appliance.engine.ranks.ranks import told_division
from appliance.engine.ranks.shared_cache import read_layers
from appliance.engine.ranks.torch_step import packed_bytes, unpack
from appliance.engine.run.device import CaptureError
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.kernel_times import time_kernels, use_timed
from appliance.engine.served_model import open_served
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.timed import as_json, from_json
from appliance.model.adapters.targets import adapter_targets
from appliance.model.loader import load_decoder
from appliance.model.shard.joint import STORE, JoinedShard, Joint, store_in
from appliance.model.shard.shard import Shard
from appliance.model.shard.split import Split
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from appliance.engine.ranks.messages import Join, ToTorchRank
    from appliance.engine.run.device import Device, Graph
    from appliance.kernels.cache.decoder_cache import KVCache
    from appliance.model.adapters.torch_slots import TorchAdapterSlots
    from appliance.model.decoder import Decoder


class TorchMember:
    """A rank's part of the model, its part of the cache, and its graphs."""

    def __init__(self, join: Join, connection: Connection, exchange: int, cache: int) -> None:
        torch.set_num_threads(join.threads)
        config, rank = join.config, join.rank
        where = torch.device("cpu")
        if join.device == "cuda":
            where = torch.device("cuda", rank)
        self._device = _device(where)
        source = open_served(config)
        division = told_division(Split(join.shares, join.is_exact), source, join.bounds)
        shard, size = division.parts[rank], division.split.size
        assert isinstance(shard, Shard)
        self._joint = Joint(store_in(exchange, size, STORE), rank, size, where)
        self._decoder = load_decoder(
            source,
            backend_of(config, where),
            where,
            getattr(torch, join.dtype),
            context_length=join.context_length,
            part=JoinedShard(shard, self._joint),
        )
        release_unused()  # memory that reading the weights took
        self._connection, self._file, self._rank = connection, cache, rank
        self._cache: KVCache | None = None
        self._graphs: dict[int, Graph] = {}
        self._source = source
        self._adapters: TorchAdapterSlots | None = None
        decoder = self._decoder
        send(connection, RankJoined(decoder.weight_bytes, decoder.num_dense))
        self._joint.connect()

    def run(self) -> None:
        """Carry out rank 0's orders, until it ends this process or ends itself."""
        while True:
            try:
                order = receive_order(self._connection)
            except EOFError:
                return
            assert not isinstance(order, ToNewRank)
            with self._device.running():
                self._do(order)

    def _do(self, order: ToTorchRank) -> None:
        match order:
            case RunStep():
                self._step(order)
            case ReplayStep(number):
                self._graphs[number].replay()
            case RunHead(num_rows):
                shape = (num_rows, self._decoder.spec.hidden_size)
                hidden = torch.empty(shape, dtype=self._decoder.dtype, device=self._decoder.device)
                self._joint.broadcast(hidden)
                self._decoder.logits(hidden)
            case CaptureStep(number, step):
                self._capture(number, step)
            case Allocate():
                self._allocate(order)
            case CopyBlocks(sources, destinations, are_open):
                copy = self._own.copy_open if are_open else self._own.copy_blocks
                copy(list(sources), list(destinations))
            case SaveBlock(block, open_block):
                content = self._own.read_block(block, open_block)
                write_window(self._file, self._rank, content)
                send(self._connection, RankDone())
            case LoadBlock(block, open_block):
                self._load(block, open_block)
            case CopyStates(pairs):
                for source, destination in pairs:
                    self._own.states[destination].copy_(self._own.states[source])
            case SaveState(row):
                content = self._own.states[row].cpu().numpy().tobytes()
                write_window(self._file, self._rank, content)
                send(self._connection, RankDone())
            case LoadState(row):
                states = self._own.states
                found = bytearray(read_window(self._file, self._rank, states.shape[1]))
                states[row].copy_(torch.frombuffer(found, dtype=torch.uint8))
                send(self._connection, RankDone())
            case MakeSlots(count, most_ranks):
                targets = adapter_targets(self._source.spec, self._source.family.names)
                self._adapters = self._decoder.adapter_slots(targets, count, most_ranks)
            case TimeKernels():
                send(self._connection, kernels_timed(self._decoder, order))
            case UseTimed(choices, kv_format):
                use_timed(self._decoder, from_json(decode(choices)), KVFormat(kv_format))
            case PutAdapter(slot, content, scales):
                assert self._adapters is not None
                adapter = None if content is None else unpack_adapter(content, scales)
                self._adapters.put(
                    slot, None if adapter is None else self._adapters.lay_out(adapter)
                )
            case _:
                assert_never(order)

    @property
    def _own(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    def _step(self, order: RunStep) -> None:
        given = torch.empty(packed_bytes(order), dtype=torch.uint8, device=self._decoder.device)
        self._joint.broadcast(given)
        step = unpack(order, given, self._adapters)
        run = self._decoder.forward if step.wants_logits else self._decoder.hidden
        run(step.token_ids, step.positions, step.batch, self._own, step.rows)

    def _capture(self, number: int, step: RunStep) -> None:
        try:
            self._graphs[number] = self._device.capture(lambda: self._step(step))
        except CaptureError as error:
            send(self._connection, RankCaptured(str(error)))
        else:
            send(self._connection, RankCaptured())

    def _allocate(self, order: Allocate) -> None:
        self._cache = None  # its memory is free for the next
        cache = self._cache = self._decoder.allocate_cache(
            read_layers(order.layers, in_torch=True),
            num_blocks=order.num_blocks,
            block_size=order.block_size,
            num_open=order.num_open,
            num_states=order.num_states,
        )
        send(self._connection, RankAllocated(cache.block_bytes, cache.open_bytes))

    def _load(self, block: int, open_block: int) -> None:
        size = self._own.block_bytes + (self._own.open_bytes if open_block >= 0 else 0)
        content = read_window(self._file, self._rank, size)
        self._own.write_block(block, content, open_block)
        send(self._connection, RankDone())


def kernels_timed(decoder: Decoder, order: TimeKernels) -> KernelsTimed:
    """Time the kernels of a rank's part, and return the answer."""
    known = from_json(decode(order.known))
    kv_format = KVFormat(order.kv_format)
    times = time_kernels(decoder, order.most_rows, order.seconds, known, kv_format)
    return KernelsTimed(times.wanted, encode(as_json(times.choices)))


def _device(where: torch.device) -> Device:
    if where.type == "cpu":
        return HostDevice()
    from appliance.engine.run.cuda_device import CudaDevice

    return CudaDevice(where)
