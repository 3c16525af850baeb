"""Faults and load from strangers and machines, for as long as a test may take.

`scripts/soak` exposes a server to the same for longer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.runs.waiting import LIMIT
from support.server.soak.clock import LIBRARY, clock_jumps, environment
from support.server.soak.connections import half_open, out_of_files, slowloris
from support.server.soak.fuzz import fuzz
from support.server.soak.start import echo_server
from support.server.soak.streams import streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.server.soak.server import Server

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that survives all of this file."""
    folder = tmp_path_factory.mktemp("chaos")
    knobs = "header_seconds=3 num_blocks=4096"  # so long that a busy client is not yet too slow
    with echo_server(folder, knobs, APPLIANCE_MAX_CONNECTIONS="200") as running:
        yield running


async def test_connections_that_say_nothing_leave_room_for_others(server: Server) -> None:
    await half_open(server, count=300)


async def test_who_sends_a_byte_now_and_then_is_hung_up_on(server: Server) -> None:
    await slowloris(server, count=20, limit=LIMIT)


async def test_a_server_without_files_left_answers_when_they_are_back(server: Server) -> None:
    await out_of_files(server, count=100)


async def test_no_fuzzed_request_is_a_failure_of_the_server(server: Server) -> None:
    statuses = await fuzz(server, count=600)
    assert {"200", "400", "404"} <= statuses.keys()


async def test_clients_that_stream_leave_nothing_behind(server: Server) -> None:
    found = await streams(server, clients=40, seconds=2.0)
    assert found["answers"]["200"] >= 40


async def test_all_of_it_works_by_ipv6(tmp_path: Path) -> None:
    with echo_server(tmp_path, APPLIANCE_HOST="::1") as server:
        assert server.url.startswith("http://[::1]:")
        found = await streams(server, clients=4, seconds=0.5, growth_mib=256)
        assert found["answers"].keys() == {"200"}
        async with httpx.AsyncClient(base_url=server.url) as client:
            page = await client.get("/")
            assert page.status_code == 200, "under the name that a browser sends: [::1]:PORT"
            foreign = await client.get("/v1/models", headers={"host": "[2001:db8::1]"})
            assert foreign.status_code == 403


async def test_a_wall_clock_that_jumps_by_years_decides_nothing(tmp_path: Path) -> None:
    if not LIBRARY.exists():
        pytest.skip("no libfaketime is there; scripts/test_tools fetches it on Debian")
    offset = tmp_path / "offset"
    surroundings = await asyncio.to_thread(environment, offset)
    with echo_server(tmp_path, "step_seconds=0.01", **surroundings) as server:
        found = await clock_jumps(server, offset, clients=4, seconds=2.0)
    assert found["answers"].keys() == {"200"}
