"""Measure ranks on this machine: sums, the links' self-test, idling, and the return after a death.

Sums and self-test run without a model. Then a server with ranks of each kind idles, one of its
ranks is killed, and the time until the server is ready again is compared with that of a load.
Goals: a sum of 4 KB <= 20 us, the self-test <= 5 s, idle ranks <= 2 % of a core, back in 10 s more
than a load.

    scripts/benchmark ranks --out scripts/bench/results/ranks.json
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from appliance.bench.load import LoadError, fetch
from appliance.bench.own_server import ServerProcess
from appliance.engine.ranks.link import LARGE
from appliance.engine.ranks.messages import OpenLink
from appliance.engine.ranks.probes import SharedMemoryLink, try_links
from appliance.engine.ranks.rank_group import RankGroup
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.kernels.cpu.library import load_library
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    import argparse

FLOATS = 1024  # 4 KB
WAYS = {
    "tensor parallel": ("--tensor-parallel", "2"),
    "pipeline parallel": ("--pipeline-parallel", "2"),
    "tensor parallel in torch": ("--tensor-parallel", "2", "--kernels", "torch"),
}
SOON = 0.02  # seconds between two polls


def time_link(rounds: int, repeats: int) -> dict[str, Any]:
    """Start another rank; time its link's self-test, and sums of 4 KB with it."""
    begin = time.perf_counter()
    ranks = RankGroup("--tensor-parallel 2", 2)
    try:
        (trial,) = try_links(ranks)
        tested = time.perf_counter() - begin
        assert trial.speed is not None, trial.problem
        sums = [_time_sums(ranks, rounds, turn) for turn in range(1, repeats + 1)]
    finally:
        ranks.close()
    return {
        "process_and_self_test_seconds": round(tested, 3),
        "message_us": round(1e6 * trial.speed.seconds, 2),
        "gigabytes_per_second": round(trial.speed.bytes_per_second / 1e9, 2),
        "sum_of_4_kb_us": {
            "median": round(1e6 * statistics.median(sums), 2),
            "least": round(1e6 * min(sums), 2),
            "most": round(1e6 * max(sums), 2),
        },
    }


def _time_sums(ranks: RankGroup, rounds: int, turn: int) -> float:
    """Return the seconds of one sum, from `2 * rounds` sums in a row.

    Each turn has memory of its own, behind the self-test's: the other rank may still be leaving the
    memory of the turn before.
    """
    library, (member,) = load_library(), ranks.members
    room = -(-group_bytes(library, 2, LARGE) // mmap.PAGESIZE) * mmap.PAGESIZE
    begin = turn * room
    os.ftruncate(ranks.exchange, begin + room)
    ranks.send([OpenLink(begin, room, FLOATS)])
    ranks.answers()
    mapping = Mapping.shared(ranks.exchange, room, begin)
    group = NativeGroup(
        library, mapping.address, rank=0, size=2, floats=FLOATS, processes=(-1, member.watched)
    )
    link = SharedMemoryLink(group, member.send_back, member.process.kill)
    _, seconds = link.echo(np.arange(FLOATS, dtype=np.float32), rounds, limit=60.0)
    return seconds / (2 * rounds)


async def time_way(options: argparse.Namespace, way: tuple[str, ...]) -> dict[str, Any]:
    """Let a server of two ranks idle, kill one of them, and time the return."""
    arguments = [*way, "--device", "cpu", "--threads", "2", "--max-model-len", "1024"]
    with ServerProcess.ours(
        options.port, *([options.model] * bool(options.model)), *arguments
    ) as server:
        await server.healthy()
        load = await _load_seconds(server)
        idle = await _idle_shares(server, options.idle_seconds)
        (rank,) = _ranks(server)
        begin = time.perf_counter()
        os.kill(rank.pid, signal.SIGKILL)
        while not (now := _ranks(server)) or now[0].pid == rank.pid or not await _is_ready(server):
            if time.perf_counter() - begin > options.limit:
                raise LoadError(f"not back after {options.limit:.0f} s: {server.last_words()}")
            await asyncio.sleep(SOON)
        back = time.perf_counter() - begin
        load = max(load, await _load_seconds(server))
    return {
        "idle_share_of_a_core": idle,
        "load_seconds": round(load, 2),
        "back_seconds": round(back, 2),
        "back_beside_load_seconds": round(back - load, 2),
    }


def _ranks(server: ServerProcess) -> list[psutil.Process]:
    found = []
    for process in server.tree():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "appliance.engine.ranks" in process.cmdline():
                found.append(process)
    return found


async def _is_ready(server: ServerProcess) -> bool:
    with contextlib.suppress(OSError, LoadError):
        status, _ = await fetch(server.endpoint, "/ready")
        return status == 200
    return False


async def _load_seconds(server: ServerProcess) -> float:
    _, body = await fetch(server.endpoint, "/metrics")
    lines = body.decode().splitlines()
    return next(float(one.split()[-1]) for one in lines if one.startswith("appliance_load_seconds"))


async def _idle_shares(server: ServerProcess, seconds: float) -> dict[str, float]:
    """Return the share of a core that the other rank takes, and the server with all of its tree."""
    await asyncio.sleep(2)  # until the work of the start has ended
    (rank,) = _ranks(server)

    def used() -> tuple[float, float, float]:
        return time.perf_counter(), sum(rank.cpu_times()[:2]), server.cpu_seconds()

    before = used()
    await asyncio.sleep(seconds)
    wall, of_rank, of_all = (now - then for now, then in zip(used(), before, strict=True))
    return {"rank": round(of_rank / wall, 4), "all processes": round(of_all / wall, 4)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--rounds", type=int, default=5000, help="two sums each")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a return")
    parser.add_argument("--port", type=int, default=8093)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "ranks",
        "conditions": conditions(),
        "link": time_link(options.rounds, options.repeats),
        "ways": {way: asyncio.run(time_way(options, WAYS[way])) for way in options.ways},
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
