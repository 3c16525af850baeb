"""Rank 0's side of the torch decoder's ranks, each on its own device.

Rank 0 sends orders and does not wait, except where a function says so; the devices meet in the
sums of a step.
"""

from __future__ import annotations

import contextlib
import select
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.json import decode, encode

from appliance.engine.ranks.messages import (
    Allocate,
    CaptureStep,
    KernelsTimed,
    RankAllocated,
    RankCaptured,
    ReplayStep,
    RunHead,
    TimeKernels,
    UseTimed,
)
from appliance.engine.ranks.ranked_cache import RankedCache, RankedStateRows
from appliance.engine.ranks.shared_cache import describe_layers
from appliance.engine.ranks.torch_step import ALIGNMENT, describe_step, pack, step_tensors
from appliance.engine.run.device import CaptureError
from appliance.engine.run.kernel_times import PartTimes
from appliance.errors import EngineError
from appliance.kernels.gpu.timed import as_json, from_json
from appliance.model.shard.joint import STORE, Joint, store_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from appliance.engine.nouns.moves import Rates
    from appliance.engine.ranks.messages import MakeSlots, PutAdapter, RunStep, ToTorchRank
    from appliance.engine.ranks.rank_group import RankGroup
    from appliance.engine.ranks.shared_step import RankStep
    from appliance.engine.run.device import Device, Event, Graph
    from appliance.engine.run.moves import StateRows
    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.model.decoder import Decoder
    from appliance.model.shard.shard import Part


LOOK_SECONDS = 1e-4  # between two looks at a device's event


@dataclass(frozen=True, slots=True)
class RankedDevice:
    """Wraps the device of a single rank; see `Device`."""

    device: Device
    ranks: TorchRanks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def record(self) -> Event:
        return _WatchedEvent(self.device.record(), self.ranks)

    def synchronize(self) -> None:
        self.record().wait()
        self.device.synchronize()

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Device`; a CPU's graph calls the function, which sends the step to all ranks."""
        if self.device.torch_device.type == "cpu":
            return self.device.capture(function)
        return self.ranks.capture(self.device, function)


@dataclass(frozen=True, slots=True)
class _WatchedEvent:
    event: Event
    ranks: TorchRanks

    @property
    def is_over(self) -> bool:
        return self.event.is_over

    def wait(self) -> None:
        """Watch the other ranks meanwhile; raise EngineError if one has ended."""
        while not self.event.is_over:
            self.ranks.look()
        self.event.wait()


class TorchRanks:
    """The other ranks, each a process with a device.

    Args:
        group: their processes.
        device: rank 0's.

    Attributes:
        joint: rank 0's place among the ranks.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group = group
        store = store_in(group.exchange, group.size, STORE)
        self.joint = Joint(store, 0, group.size, device)
        self._gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self._numbers = count()
        self._capture: _Capture | None = None

    def connect(self) -> None:
        """Let the ranks meet, once all have loaded.

        Raises:
            EngineError: one does not come.
        """
        try:
            self.joint.connect()
        except RuntimeError as error:
            raise EngineError(
                self.group.describe_exit() or f"the ranks cannot meet: {error}"
            ) from error

    def order(self, message: ToTorchRank) -> None:
        """Send all other ranks one order."""
        self.group.check()
        self.group.send([message] * (self.group.size - 1))

    def call(self, message: MakeSlots | PutAdapter) -> None:
        """Send all ranks one order, which they carry out before the next step."""
        self.order(message)

    def allocate(
        self,
        own: Decoder,
        parts: Sequence[Part],
        layers: Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int,
        num_states: int,
    ) -> RankedCache:
        """Allocate a cache of the same blocks on each rank's device; wait for the answers."""
        described = describe_layers(layers)
        self.order(Allocate(described, num_blocks, block_size, num_open, num_states))
        cache = own.allocate_cache(
            layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
        )
        answers = [found for found in self.group.answers() if isinstance(found, RankAllocated)]
        sizes = [(cache.block_bytes, cache.open_bytes)]
        sizes += [(found.block_bytes, found.open_bytes) for found in answers]
        self.group.kv_bytes = tuple(
            block * num_blocks + opened * num_open + part.spec.state_bytes * num_states
            for (block, opened), part in zip(sizes, parts, strict=True)
        )
        states = tuple(part.spec.state_bytes for part in parts)
        return RankedCache(cache, self, tuple(sizes), states)

    def time_kernels(
        self,
        rank: int,
        known: Mapping[str, TimedChoices],
        most_rows: int,
        seconds: float,
        kv_format: KVFormat,
    ) -> PartTimes:
        """Let another rank time its kernels; see `run.kernel_times`."""
        order = TimeKernels(encode(as_json(known)), most_rows, seconds, kv_format.value)
        answer = self.group.ask(rank, order)
        assert isinstance(answer, KernelsTimed)
        return PartTimes(answer.wanted, from_json(decode(answer.choices)))

    def use_timed(
        self, rank: int, choices: Mapping[str, TimedChoices], kv_format: KVFormat
    ) -> None:
        """Let another rank work by timed choices."""
        self.group.tell(rank, UseTimed(encode(as_json(choices)), kv_format.value))

    def watched(self, device: Device) -> Device:
        """Return rank 0's device, which watches the other ranks while torch waits for them."""
        return cast("Device", RankedDevice(device, self))

    def state_rows(self, cache: RankedCache, device: Device, rates: Rates) -> StateRows:
        """Return the mover of a cache's rows of recurrent state."""
        return RankedStateRows(cache, device, rates)

    @contextlib.contextmanager
    def step(self, step: RankStep) -> Iterator[None]:
        """Give a step to the other ranks while rank 0 runs its own part."""
        tensors = step_tensors(step)
        with self._together():
            self._order_step(describe_step(tensors, step))
            self.joint.broadcast(pack(tensors, self._gap))
            yield

    @contextlib.contextmanager
    def head(self, hidden: Tensor) -> Iterator[None]:
        """Give rows for the head to the other ranks while rank 0 runs its own part."""
        if not hidden.shape[0]:
            yield
            return
        with self._together():
            self.order(RunHead(hidden.shape[0]))
            self.joint.broadcast(hidden.contiguous())
            yield

    def capture(self, device: Device, function: Callable[[], None]) -> Graph:
        """Capture a step in all ranks, and wait for their answers; see `Device.capture`."""
        capture = self._capture = _Capture(next(self._numbers))
        try:
            graph = device.capture(function)
        finally:
            self._capture = None
            is_open = capture.is_sent and not self.group.is_interrupted
            answers = self.group.answers() if is_open else []
        for answer in answers:
            if isinstance(answer, RankCaptured) and answer.why_not:
                raise CaptureError(f"another rank: {answer.why_not}")
        return _RankedGraph(graph, self, capture.number)

    def look(self) -> None:
        """Wait a moment; raise EngineError if a rank has ended."""
        if select.select(self.group.watched, [], [], LOOK_SECONDS)[0]:
            raise EngineError(self.group.lost())

    def _order_step(self, step: RunStep) -> None:
        if self._capture is None:
            self.order(step)
        elif not self._capture.is_sent:  # a capture runs the step twice, in each rank by itself
            self._capture.is_sent = True
            self.order(CaptureStep(self._capture.number, step))

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self.group.check()
        try:
            yield
        except BaseException as error:
            # What fails while it is captured has not run, and the other ranks do not wait for it.
            self.group.is_interrupted = not _is_capturing()
            how = self.group.describe_exit() if isinstance(error, RuntimeError) else None
            if how is not None:
                raise EngineError(how) from error
            raise


class TorchWork:
    """A share of every layer, whose results the devices sum; see `RankWork`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, step: RankStep, cache: RankedCache) -> Tensor:
        run = self._decoder.forward if step.wants_logits else self._decoder.hidden
        return run(step.token_ids, step.positions, step.batch, cache.own, step.rows)

    def head(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class _Capture:
    def __init__(self, number: int) -> None:
        self.number, self.is_sent = number, False


class _RankedGraph:
    """A step that all ranks have captured."""

    def __init__(self, graph: Graph, ranks: TorchRanks, number: int) -> None:
        self._graph, self._ranks, self._number = graph, ranks, number

    def replay(self) -> None:
        self._ranks.order(ReplayStep(self._number))
        self._graph.replay()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
