"""Tests the links of ranks and measures their memory, before they load anything.

The links are those of the CPU library; `serve_probes` is the other ranks' side of all tests.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from appliance.engine.ranks.bandwidth import copy_bandwidth
from appliance.engine.ranks.links.shared_memory import SharedMemoryLink, send_back
from appliance.engine.ranks.links.trial import LARGE, new_seed, try_link
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
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.engine import RankLostError
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.kernels.cpu.library import load_library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    import torch

    from appliance.engine.ranks.links.link import LinkTrial
    from appliance.engine.ranks.rank_group import RankGroup

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
            *(library, mapping.address),
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
                group = NativeGroup(
                    *(load_library(), mapping.address), rank=1, size=2, floats=floats
                )
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
