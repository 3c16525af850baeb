"""A model with several engine processes: one endpoint, whose clients notice no dead process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.runs.waiting import LIMIT, until

from appliance.config import EngineConfig
from appliance.engine.process.supervisor import EngineState, SupervisionLimits
from appliance.errors import ConfigError, MemoryPlanError
from appliance.events import Info, Stats
from appliance.server.dashboard.watcher import Watcher
from appliance.server.models.replicas import Memories, divided, make_engine

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.process.client import EngineClient
    from tests.server.conftest import Running, Serve

TWO: dict[str, Any] = {"replicas": 2, "threads": 2}
DIE = 264  # see echo_worker.py
MIB = 2**20


def states(running: Running) -> list[str]:
    return [one.state.value for one in running.state.engine.replicas]


def kill(replica: EngineClient) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)


def metrics_of(text: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


async def test_a_conversation_stays_and_others_are_spread(serve: Serve) -> None:
    async with serve(**TWO) as running:
        first, second = running.state.engine.replicas
        talk = "a long beginning of a conversation that fills some blocks of the cache"
        for turn in range(4):
            answer = (await running.complete(talk, max_tokens=8)).json()["choices"][0]["text"]
            talk += answer + " and more of it in every turn, and still more" * (1 + turn)
        served = [one.stats.prompt_tokens_total for one in (first, second)]
        assert sorted(served)[0] == 0, "all turns on one"
        many = [running.complete(f"{n} another one " * 3, max_tokens=4) for n in range(6)]
        assert {one.status_code for one in await asyncio.gather(*many)} == {200}
        await until(running.idle)
        assert min(one.stats.prompt_tokens_total for one in (first, second)) > 0
        total = sum(one.stats.prompt_tokens_total for one in (first, second))
        assert running.state.engine.stats.prompt_tokens_total == total


async def test_a_replica_that_dies_under_load_loses_no_request(
    serve: Serve, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    knobs = f"holds_at=3 until={gate}"  # so that nothing is answered before one has died
    async with serve(knobs, max_num_seqs=2, **TWO) as running:
        asked = [
            asyncio.create_task(running.complete(f"{n}bcdef", max_tokens=6)) for n in range(12)
        ]
        first, second = running.state.engine.replicas
        await until(lambda: first.num_running == second.num_running == 2)
        await until(lambda: first.num_waiting + second.num_waiting == 8)
        assert first.num_waiting >= 1, "so that some have to be handed over"
        kill(first)
        await until(lambda: first.state is EngineState.RESTARTING)
        assert (await running.http.get("/ready")).status_code == 200
        await until(lambda: second.num_running + second.num_waiting >= 8)
        gate.touch()
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts == [f"{n}bcdef"[:6] for n in range(12)]
        await until(lambda: states(running) == ["ready", "ready"])
        assert running.state.engine.restarts == 1
        assert running.state.engine.quarantined == 0


async def test_the_others_serve_while_one_restarts(serve: Serve) -> None:
    limits = SupervisionLimits(step_timeout=LIMIT, backoff=60.0)
    async with serve(limits=limits, **TWO) as running:
        first, second = running.state.engine.replicas
        kill(first)  # the first restart comes at once, the second after a minute
        await until(lambda: first.restarts == 1 and first.state is EngineState.READY)
        kill(first)
        await until(lambda: first.state is EngineState.RESTARTING)
        for _ in range(3):
            assert (await running.complete("abc", max_tokens=3)).status_code == 200
        assert (await running.http.get("/ready")).status_code == 200
        health = await running.http.get("/health")
        assert health.status_code == 200
        assert health.json()["replicas"] == {"echo": ["restarting", "ready"]}
        found = metrics_of((await running.http.get("/metrics")).text)
        assert found["appliance_replica_up"] == [0, 1]
        assert found["appliance_engine_up"] == [1]
        assert found["appliance_replica_restarts_total"] == [1, 0]
        kill(second)
        await until(lambda: second.restarts == 1 and second.state is EngineState.READY)
        assert (await running.complete("abc", max_tokens=3)).status_code == 200


async def test_what_kills_one_after_the_other_is_refused(serve: Serve) -> None:
    async with serve(**TWO) as running:
        killer = [1, 2, DIE]
        refused = await running.complete(killer, max_tokens=3)
        assert refused.status_code >= 500
        await until(lambda: states(running) == ["ready", "ready"])
        assert sum(one.restarts for one in running.state.engine.replicas) == 2, "no more than two"
        again = await running.complete(killer, max_tokens=3)
        assert again.status_code == 500
        assert "twice one died" in again.json()["error"]["message"]
        assert running.state.engine.quarantined == 1
        assert sum(one.restarts for one in running.state.engine.replicas) == 2


async def test_each_sleeps_by_itself_and_one_alone_is_woken(serve: Serve) -> None:
    async with serve(**TWO) as running:
        for replica in running.state.engine.replicas:
            replica.sleep()
        await until(lambda: states(running) == ["asleep", "asleep"])
        assert (await running.http.get("/health")).json()["status"] == "asleep"
        assert (await running.complete("abc", max_tokens=3)).status_code == 200
        assert sorted(states(running)) == ["asleep", "ready"]
        assert running.state.engine.wakes.number == 1


async def test_an_adapter_is_loaded_by_all_and_a_broken_one_refused(
    serve: Serve, tmp_path: Path
) -> None:
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    async with serve(lora_dir=str(tmp_path), **TWO) as running:
        for name, status in (("good", 200), ("broken", 400)):
            body = {"lora_name": name, "lora_path": name}
            answer = await running.http.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == status, answer.text


async def test_limits_of_a_key_hold_over_all_replicas(serve: Serve) -> None:
    """Requests that nothing ties to one replica go to both, and count together for their key."""
    key = "a-key-of-anna"
    limited = {"api_keys": {"anna": f"{key} requests=4"}}
    async with serve(server=limited, headers={"authorization": f"Bearer {key}"}, **TWO) as running:
        asked = [await running.complete(f"{n} is another one", max_tokens=1) for n in range(6)]
        assert [one.status_code for one in asked] == [200] * 4 + [429] * 2
        engines = running.state.engine.replicas
        await until(lambda: all(one.stats.prompt_tokens_total for one in engines))


async def test_a_dashboard_looks_at_one_replica(serve: Serve) -> None:
    from appliance.server.dashboard.block_feed import BlockFeed

    async with serve("holds_at=4", **TWO) as running:
        first, second = running.state.engine.replicas
        asked = [asyncio.create_task(running.complete(f"{n}bc", max_tokens=8)) for n in range(2)]
        await until(lambda: first.num_running == second.num_running == 1)
        await until(lambda: bool(first.sequences and second.sequences))
        for place, replica in enumerate((first, second)):
            events = Watcher(running.server, BlockFeed(), "", place).poll()
            (info,) = (event for event in events if isinstance(event, Info))
            (stats,) = (event for event in events if isinstance(event, Stats))
            assert (info.replica, info.state) == (place, "ready")
            assert [one.requests_running for one in stats.replicas] == [1, 1]
            assert stats.requests_running == 2
            shown = [one.request_id for event in events for one in getattr(event, "sequences", ())]
            assert shown == [one.request_id for one in replica.sequences]
            table = await running.http.get(f"/admin/v1/sequences/{shown[0]}/0/blocks")
            assert len(table.json()["blocks"]) == replica.sequences[0].blocks > 0
        assert (await running.http.get("/admin/v1/events?replica=x")).status_code == 400
        running.state.engine.fail_all(RuntimeError("enough"))
        await asyncio.gather(*asked)


async def test_replicas_that_do_not_fit_say_so(serve: Serve) -> None:
    room = {"models_memory": 30 * MIB}
    with pytest.raises(MemoryPlanError, match="--replicas 2 divides the memory by 2"):
        async with serve(f"needs={20 * MIB}", server=room, **TWO):
            pass
    async with serve(f"needs={14 * MIB}", server=room, **TWO) as running:
        assert states(running) == ["ready", "ready"]


def test_threads_are_divided() -> None:
    shares = [one.threads for one in divided(EngineConfig(replicas=3, threads=8))]
    assert shares == [3, 3, 2]
    with pytest.raises(ConfigError, match=r"--threads gives 2; use --replicas 2 or less"):
        divided(EngineConfig(replicas=3, threads=2))
    with pytest.raises(ConfigError, match=r"with --tensor-parallel 2 needs .* --replicas 1 or"):
        divided(EngineConfig(replicas=2, threads=3, tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"--threads gives 1; use --pipeline-parallel 1"):
        divided(EngineConfig(replicas=1, threads=1, pipeline_parallel=2))


@pytest.mark.parametrize(
    ("options", "gpus", "says"),
    [
        ({"replicas": 3}, ["a", "b"], "needs 3 GPUs, and this machine has 2; use --replicas 2"),
        ({"replicas": 2, "device": "cuda"}, [], "this machine has 0; use --device cpu"),
        ({"replicas": 2, "tensor_parallel": 2}, list("abc"), "needs 4 GPUs.*use --replicas 1"),
        (
            {"replicas": 2, "pipeline_parallel": 2},
            list("abc"),
            "with --pipeline-parallel 2 needs 4 GPUs",
        ),
    ],
)
def test_more_than_the_gpus_is_refused(options: dict[str, Any], gpus: list[str], says: str) -> None:
    def make(*given: Any) -> EngineClient:
        raise AssertionError("refused before any is made")

    with pytest.raises(ConfigError, match=says):
        make_engine(EngineConfig(**options), Memories(None, is_shared=False), make, gpus)
