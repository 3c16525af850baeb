"""Several engines share a memory: which make room, which wait, and what a failure leaves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from support.echo.echo_engine import ECHO, LIMITS, end_tokens, request, tokens
from support.runs.waiting import until

from appliance.config import EngineConfig
from appliance.engine.process.client import EngineClient
from appliance.engine.process.residency import Residency
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineUnavailableError, MemoryPlanError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def engines(limit: int | None, *knobs: str) -> AsyncIterator[list[EngineClient]]:
    """Start engines one after the other."""
    residency = Residency(limit, is_shared=True)
    clients = [
        EngineClient(EngineConfig(model=one), command=ECHO, limits=LIMITS, residency=residency)
        for one in knobs
    ]
    async with AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.close)
            await load(client)
        yield clients


async def load(client: EngineClient) -> None:
    await client.start(end_tokens, lambda stage, done, total: None)


def resident(clients: list[EngineClient]) -> list[bool]:
    return [client.state is EngineState.READY for client in clients]


async def test_two_stay_where_both_fit_and_the_one_idle_longest_makes_room() -> None:
    async with engines(25, "needs=10", "needs=10", "needs=11") as three:
        assert resident(three) == [False, True, True]
        assert await tokens(three[1], request(1, max_tokens=1)) == [1]
        assert await tokens(three[0], request(2, max_tokens=1)) == [2]
        assert resident(three) == [True, True, False], "the second was used after the third"


async def test_without_a_limit_it_is_what_the_first_one_finds_free() -> None:
    async with engines(None, "needs=10 free=19", "needs=10 free=9") as two:
        assert resident(two) == [False, True]


async def test_what_another_program_takes_is_made_room_for_as_well() -> None:
    async with engines(100, "needs=10", "needs=10 free=3") as two:
        assert resident(two) == [False, True]


async def test_requests_in_work_end_first_and_later_ones_come_back_in_turn() -> None:
    async with engines(15, "needs=10 step_seconds=0.001") as (first,):
        second = EngineClient(
            EngineConfig(model="needs=10"),
            command=ECHO,
            limits=LIMITS,
            residency=first.place.residency,
        )
        long = asyncio.create_task(tokens(first, request(7, max_tokens=300, ignore_eos=True)))
        await until(lambda: first.num_running == 1)
        loading = asyncio.create_task(load(second))
        await until(lambda: first.place.is_leaving)
        late = asyncio.create_task(tokens(first, request(8, max_tokens=1)))
        await loading
        assert await tokens(second, request(9, max_tokens=1)) == [9]
        assert await long == [7] * 300
        assert await late == [8]
        assert resident([first, second]) == [True, False]
        assert first.restarts == second.restarts == 0
        await second.close()


async def test_a_model_larger_than_the_limit_is_refused_and_the_others_stay() -> None:
    async with engines(15, "needs=10") as (small,):
        large = EngineClient(
            EngineConfig(model="needs=16"),
            command=ECHO,
            limits=LIMITS,
            residency=small.place.residency,
        )
        for _ in range(2):
            with pytest.raises(MemoryPlanError, match="16 of 15"):
                await load(large)
        assert large.place.memory_bytes == 0
        assert resident([small]) == [True]
        await large.close()


async def test_a_wake_that_the_memory_forbids_is_told_and_tried_with_the_next_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    flag = tmp_path_factory.mktemp("flag") / "refuses"
    async with engines(15, f"needs=10 refuses_while={flag}") as (client,):
        client.sleep()
        flag.touch()
        with pytest.raises(EngineUnavailableError, match=r"cannot wake.*not free yet"):
            await tokens(client, request(1))
        assert (client.state, client.restarts) == (EngineState.ASLEEP, 0)
        flag.unlink()
        assert await tokens(client, request(2, max_tokens=1)) == [2]
