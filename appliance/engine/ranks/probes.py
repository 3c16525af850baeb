"""Tests the links of ranks and measures their memory, before they load anything.

The links are those of the CPU library, where data pass as in a step: by sums in which all ranks but
one add zeros. `serve_probes` is the other ranks' side of all tests.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.ranks.link import LARGE, LinkPath, LinkTimeoutError, new_seed, try_link
from appliance.engine.ranks.messages import (
    CopyMemory,
    Join,
    MeasureGPU,
    MemoryCopied,
    OpenDevice,
    OpenLink,
    RankDone,
    SendBack,
    TryLinks,
    receive_order,
    send,
)
from appliance.errors import EngineError
from appliance.kernels import arrays
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.engine import RankLostError
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.kernels.cpu.library import load_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    import torch
    from numpy.typing import NDArray

    from appliance.engine.ranks.link import LinkTrial
    from appliance.engine.ranks.rank_group import RankGroup


COPY_BYTES = 64 << 20  # of all threads; more than most caches
PASSES = 3
# Of one link's test, after which a rank counts as hanging; a sound link takes far less, but on a
# machine full of other work each message waits for both processes' turns.
LINK_SECONDS = 20.0


def try_links(ranks: RankGroup, limit: float = LINK_SECONDS) -> tuple[LinkTrial, ...]:
    """Test the link to each other rank once it is up; end those that do not answer.

    Args:
        limit: seconds per link.

    Raises:
        EngineError: a rank has ended.
    """
    library = load_library()
    room = -(-group_bytes(library, 2, LARGE) // mmap.PAGESIZE) * mmap.PAGESIZE
    os.ftruncate(ranks.exchange, room * len(ranks.members))
    ranks.send([OpenLink(place * room, room, LARGE) for place in range(len(ranks.members))])
    ranks.answers()
    trials = []
    for place, member in enumerate(ranks.members):
        mapping = Mapping.shared(ranks.exchange, room, place * room)
        group = NativeGroup(
            library,
            mapping.address,
            rank=0,
            size=2,
            floats=LARGE,
            processes=(-1, member.watched),
        )
        link = SharedMemoryLink(group, member.send_back, member.process.kill)
        try:
            trials.append(try_link(link, new_seed(), limit))
        except (RankLostError, OSError) as error:
            raise EngineError(ranks.lost()) from error
    return tuple(trials)


def copy_rates(ranks: RankGroup, threads: Sequence[int]) -> tuple[float, ...]:
    """Let all ranks copy memory at the same time; return bytes per second.

    Ranks with as many threads get the average of their results: the system moves them between
    processors all the time.

    Raises:
        EngineError: a rank has ended.
    """
    ranks.send([CopyMemory(count) for count in threads[1:]])
    found = [copy_bandwidth(threads[0])]
    for answer in ranks.answers():
        assert isinstance(answer, MemoryCopied)
        found.append(answer.bytes_per_second)
    alike = {
        count: [one for one, other in zip(found, threads, strict=True) if other == count]
        for count in threads
    }
    return tuple(sum(alike[count]) / len(alike[count]) for count in threads)


def serve_probes(connection: Connection, exchange: int) -> Join:
    """Serve rank 0's tests until it orders a part to be loaded.

    Args:
        exchange: file of the ranks' shared memory.

    Raises:
        EOFError: rank 0 has ended.
    """
    mapping: Mapping | None = None
    group: NativeGroup | None = None
    device: torch.device | None = None
    while not isinstance(order := receive_order(connection), Join):
        match order:
            case OpenLink(offset, num_bytes, floats):
                mapping = Mapping.shared(exchange, num_bytes, offset)
                group = NativeGroup(load_library(), mapping.address, rank=1, size=2, floats=floats)
                send(connection, RankDone())
            case SendBack(count, rounds):
                assert group is not None
                send_back(group, count, rounds)
            case CopyMemory(threads):
                send(connection, MemoryCopied(copy_bandwidth(threads)))
            case OpenDevice() | TryLinks() | MeasureGPU():
                from appliance.engine.ranks.torch_probes import serve_device  # loads torch

                device = serve_device(order, connection, exchange, device)
            case _:
                raise AssertionError(f"{type(order).__name__} before Join")
    del group, mapping
    return order


class SharedMemoryLink:
    """The end that starts a test.

    Args:
        group: of this rank and the other.
        begin: tells the other to run `send_back` with a count and rounds.
        give_up: ends the other process, in case this one waits for it.
    """

    path = LinkPath.SHARED

    def __init__(
        self,
        group: NativeGroup,
        begin: Callable[[int, int], None],
        give_up: Callable[[], None],
    ) -> None:
        self._group, self._begin, self._give_up = group, begin, give_up

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send data there and back; see `Link`.

        Raises:
            LinkTimeoutError: it takes longer than the limit; ends the other process.
            RankLostError: the other process has ended by itself.
        """
        values = arrays.of_numpy(data.copy())
        found: list[float] = []
        lost: list[RankLostError] = []

        def run() -> None:
            try:
                found.append(_send(self._group, values, rounds))
            except RankLostError as error:
                lost.append(error)

        self._begin(data.size, rounds)
        thread = Thread(target=run, name="link", daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            self._give_up()
            thread.join()
            raise LinkTimeoutError
        if lost:
            raise lost[0]
        return values, found[0]


def _send(group: NativeGroup, values: Any, rounds: int) -> float:
    group.meet()
    begin = time.perf_counter()
    for _ in range(rounds):
        group.sum(values)
        values[:] = 0
        group.sum(values)
    return time.perf_counter() - begin


def send_back(group: NativeGroup, count: int, rounds: int) -> None:
    """Serve as the other end: receive numbers and send them back, `rounds` times.

    Raises:
        RankLostError: the rank that began has ended.
    """
    values = arrays.of_numpy(np.zeros(count, np.float32))
    group.meet()
    for _ in range(rounds):
        values[:] = 0
        group.sum(values)
        group.sum(values)


def copy_bandwidth(threads: int) -> float:
    """Return bytes read and written per second in the fastest pass.

    Takes twice `COPY_BYTES` of memory meanwhile.
    """
    each = -(-COPY_BYTES // threads)
    source, target = (np.frombuffer(Mapping.of(each * threads).memory, np.uint8) for _ in range(2))
    source[:] = 1
    parts = [slice(each * place, each * (place + 1)) for place in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + PASSES):  # the first one touches the target's memory
            begin = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            best = min(best, time.perf_counter() - begin)
    return 2 * each * threads / best
