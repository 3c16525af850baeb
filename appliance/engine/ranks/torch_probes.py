"""Tests the links between torch's ranks and measures their GPUs, before they load anything.

GPUs exchange data by NCCL, peer to peer or through the host's memory. Each path is tested by
processes of its own: a GPU's sum that hangs only ends with its process, and NCCL chooses its path
once. On a CPU gloo has one path, and its sums time out by themselves.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.devices import memory_budget
from appliance.engine.ranks.link import (
    TRIAL_SECONDS,
    LinkPath,
    LinkTimeoutError,
    LinkTrial,
    choose_link,
    new_seed,
    try_link,
)
from appliance.engine.ranks.messages import (
    LinksTried,
    MeasureGPU,
    MemoryCopied,
    OpenDevice,
    RankDone,
    TryLinks,
    send,
)
from appliance.engine.ranks.probes import LINK_SECONDS
from appliance.engine.ranks.rank_group import RankGroup, RankProcess
from appliance.engine.ranks.shares import RankFacts
from appliance.errors import EngineError
from appliance.model.shard.joint import Joint, store_in

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray


OPEN_SECONDS = 600.0  # to load torch and open a device, which tests nothing yet
MEET_SECONDS = 20.0  # beside the tests, for processes that each have a GPU
COPY_BYTES = 256 << 20  # more than any GPU's cache
PASSES = 3
# NCCL's user guide, "Environment Variables": 1 copies through the host's memory instead.
WITHOUT_PEERS = "NCCL_P2P_DISABLE"


def ways_of(kind: str) -> tuple[LinkPath, ...]:
    """List the paths between devices of a kind, the usually fastest first."""
    if kind == "cpu":
        return (LinkPath.SOCKET,)
    if os.environ.get(WITHOUT_PEERS, "0") != "0":
        return (LinkPath.HOST,)
    return LinkPath.PEER, LinkPath.HOST


def start_tested(
    asked: str, size: int, kind: str, row_bytes: float
) -> tuple[RankGroup, tuple[LinkTrial, ...], str]:
    """Start the other ranks on the fastest sound path, which this process then takes too.

    Args:
        asked: the setting that requests ranks, for messages.
        kind: of their devices.
        row_bytes: what a rank sends per token in an exchange.

    Returns:
        The ranks, the links to them, and why they do not take the usual path; empty if they do.

    Raises:
        EngineError: no rank can be started, or no path is sound.
    """
    with ExitStack() as unused:
        ways: list[_Way] = []
        for path in ways_of(kind):
            ways.append(_Way(asked, size, kind, path))
            unused.callback(ways[-1].group.close)
        trials = [way.try_links() for way in ways]
        choice = choose_link([max(found, key=_seconds) for found in trials], row_bytes)
        if choice.trial is None:
            raise EngineError(
                f"the ranks have no sound way between them: {choice.reason}; start again, or leave"
                f" out {asked}"
            )
        place = next(at for at, way in enumerate(ways) if way.path is choice.trial.path)
        os.environ.update(ways[place].environment)
        chosen = ways.pop(place)
        unused.pop_all()
        for way in ways:
            way.group.close()
    return chosen.group, trials[place], choice.reason


class _Way:
    """The other ranks, started for one path."""

    def __init__(self, asked: str, size: int, kind: str, path: LinkPath) -> None:
        self.path, self.size = path, size
        self.environment: Mapping[str, str] = {}
        if path is LinkPath.HOST:
            self.environment = {WITHOUT_PEERS: "1"}
        self.group = RankGroup(asked, size, self.environment)
        for member in self.group.members:
            send(member.connection, OpenDevice(_name(kind, member.rank)))
        self._kind = kind

    def try_links(self) -> tuple[LinkTrial, ...]:
        """Test rank 0's links; stop at the first unsound one."""
        limit = LINK_SECONDS if self.path is LinkPath.SOCKET else TRIAL_SECONDS
        try:
            with ExitStack() as undo:
                return self._try_links(limit, undo)
        except TimeoutError:
            problem = f"did not answer in time: {limit:.0f} s"
        except (EOFError, OSError, EngineError):
            how = self.group.describe_exit()
            problem = f"ended the process that tested it{'' if how is None else f': {how}'}"
        except RuntimeError as error:
            problem = f"fails: {self.group.describe_exit() or error}"
        return (LinkTrial(self.path, None, problem),)

    def _try_links(self, limit: float, undo: ExitStack) -> tuple[LinkTrial, ...]:
        first: RankProcess | None = None
        if self.path is not LinkPath.SOCKET:
            first = RankProcess(0, self.group.exchange, self.group.cache, self.environment)
            undo.callback(first.end)
            send(first.connection, OpenDevice(_name(self._kind, 0)))
        others = self.group.members
        for process in [*others, *([] if first is None else [first])]:
            process.answer(OPEN_SECONDS)
        orders = [TryLinks(rank, self.size, self.path, limit) for rank in range(self.size)]
        self.group.send(orders[1:])
        if first is None:
            found = take_part(orders[0], self.group.exchange, torch.device(self._kind))
        else:
            send(first.connection, orders[0])
            answer = first.answer(MEET_SECONDS + (self.size - 1) * limit)
            assert isinstance(answer, LinksTried)
            found = answer.trials
        if not found[-1].problem:
            for member in others:
                member.answer(limit)
        return found


def take_part(order: TryLinks, exchange: int, device: torch.device) -> tuple[LinkTrial, ...]:
    """Test links as rank 0; as another rank, serve the test and return nothing.

    Args:
        exchange: file in which the ranks find each other.

    Raises:
        RuntimeError: another rank has ended, or the devices cannot reach each other.
    """
    store = store_in(exchange, order.size, "links")
    joint = Joint(store, order.rank, order.size, device)
    is_watched = order.path is not LinkPath.SOCKET  # by the process that waits for the answer
    joint.connect(timedelta(seconds=order.limit + is_watched * MEET_SECONDS))
    if order.rank == 0:
        return try_joint(joint, order.path, order.limit)
    send_back(joint)
    return ()


def serve_device(
    order: OpenDevice | TryLinks | MeasureGPU,
    connection: Connection,
    exchange: int,
    device: torch.device | None,
) -> torch.device:
    """Carry out rank 0's tests on a device; return the device."""
    match order:
        case OpenDevice(name):
            device = torch.device(name)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            send(connection, RankDone())
        case TryLinks():
            assert device is not None
            found = take_part(order, exchange, device)
            send(connection, LinksTried(found) if order.rank == 0 else RankDone())
        case MeasureGPU(utilization):
            assert device is not None
            bandwidth = device_bandwidth(device)
            send(connection, MemoryCopied(bandwidth, memory_budget(device, utilization)))
    assert device is not None
    return device


def gpu_facts(group: RankGroup, own: torch.device, utilization: float) -> tuple[RankFacts, ...]:
    """Let all ranks copy on their GPUs at the same time; return each one's facts.

    Args:
        own: rank 0's.
        utilization: usable share of a GPU's memory.

    Raises:
        EngineError: a rank has ended.
    """
    group.send([MeasureGPU(utilization)] * len(group.members))
    found = [RankFacts(device_bandwidth(own), memory_budget(own, utilization))]
    for answer in group.answers():
        assert isinstance(answer, MemoryCopied)
        found.append(RankFacts(answer.bytes_per_second, answer.budget_bytes))
    return tuple(found)


def device_bandwidth(device: torch.device) -> float:
    """Return bytes per second of the fastest copy on a device; counts reads and writes."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(1 + PASSES):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * COPY_BYTES / best


class JointLink:
    """Rank 0's end of the way to another rank; all ranks take part in each sum.

    Args:
        joint: connected; its operations time out after about the test's limit.
        path: of its sums.
        other: the rank that sends back.
    """

    def __init__(self, joint: Joint, path: LinkPath, other: int) -> None:
        self.path = path
        self._joint, self._other = joint, other

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send data there and back; see `Link`.

        A GPU's sum that never ends is for another process to notice.

        Raises:
            LinkTimeoutError: it took longer than the limit.
            RuntimeError: another rank has ended, or the devices cannot reach each other.
        """
        begin = time.perf_counter()
        try:
            _announce(self._joint, self._other, data.size, rounds)
            values = torch.from_numpy(data.copy()).to(self._joint.device)
            begin = time.perf_counter()
            for _ in range(rounds):
                values = self._joint.sum(values)
                values = self._joint.sum(values.zero_())
            back = values.cpu().numpy()
        except RuntimeError as error:
            if time.perf_counter() - begin < limit:
                raise
            raise LinkTimeoutError from error
        seconds = time.perf_counter() - begin
        if seconds > limit:
            raise LinkTimeoutError
        return back, seconds


def try_joint(joint: Joint, path: LinkPath, limit: float) -> tuple[LinkTrial, ...]:
    """Test the links to the other ranks; stop at the first unsound one.

    Args:
        limit: seconds for each.

    Raises:
        RuntimeError: another rank has ended, or the devices cannot reach each other.
    """
    trials = []
    for other in range(1, joint.size):
        trials.append(try_link(JointLink(joint, path, other), new_seed(), limit))
        if trials[-1].problem:
            return tuple(trials)
    _announce(joint, 0, 0, 0)
    return tuple(trials)


def send_back(joint: Joint) -> None:
    """Be another rank while rank 0 runs `try_joint`.

    Raises:
        RuntimeError: rank 0 has ended or does not go on.
    """
    while True:
        order = torch.zeros(3, dtype=torch.int64, device=joint.device)
        joint.broadcast(order)
        other, count, rounds = order.tolist()
        if not rounds:
            return
        values = torch.zeros(count, device=joint.device)
        for _ in range(rounds):
            values = joint.sum(values.zero_())
            if joint.rank != other:
                values.zero_()
            values = joint.sum(values)


def _announce(joint: Joint, other: int, count: int, rounds: int) -> None:
    joint.broadcast(torch.tensor([other, count, rounds], device=joint.device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(kind: str, rank: int) -> str:
    return kind if kind == "cpu" else f"{kind}:{rank}"


def _seconds(trial: LinkTrial) -> float:
    return trial.time_of()
