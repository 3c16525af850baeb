"""The hooks that Ray calls: the choice of a replica, and the number of replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from appliance.cluster.deployments import wanted_replicas
from appliance.cluster.front import ReplicaRequest
from appliance.cluster.prefix_router import ASKED, BLOCKS, URL, PrefixRouter
from appliance.engine.process.router import bound


def replica(name: str, blocks: int | None = 100) -> Any:
    stats = {} if blocks is None else {URL: f"http://{name}", BLOCKS: blocks}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def router() -> PrefixRouter:
    made = PrefixRouter.__new__(PrefixRouter)  # Ray's own part needs a cluster
    made.initialize_state()
    return made


def pending(asked: ReplicaRequest) -> PendingRequest:
    return PendingRequest(args=[], kwargs={ASKED: asked}, metadata=RequestMetadata("1", "1"))


async def chosen(
    router: PrefixRouter, replicas: list[Any], hashes: list[bytes], **more: Any
) -> list[str]:
    asked = ReplicaRequest(hashes, Counter(more.get("num_open", {})), set(more.get("tried", ())))
    found = await router.choose_replicas(replicas, pending(asked))
    return [one.replica_id.unique_id for rank in found for one in rank]


PROMPT, OTHER = [b"1", b"2"], [b"3", b"4"]


async def test_a_prompt_goes_where_it_is_known_within_the_bound() -> None:
    one, pair = router(), [replica("a"), replica("b")]
    assert await chosen(one, pair, PROMPT) == ["a"]
    assert await chosen(one, pair, OTHER) == ["b"]
    for _ in range(3):
        assert await chosen(one, pair, [*PROMPT, b"5"], num_open={"a": 3}) == ["a"]
    assert await chosen(one, pair, PROMPT, num_open={"a": bound(0) + 1}) == ["b"]


async def test_one_that_was_tried_is_chosen_only_when_all_were() -> None:
    one, pair = router(), [replica("a"), replica("b")]
    assert await chosen(one, pair, PROMPT, tried="a") == ["b"]
    assert await chosen(one, pair, PROMPT, tried="ab") == ["a"]


async def test_one_that_has_not_said_where_it_listens_is_not_chosen() -> None:
    one = router()
    assert await chosen(one, [replica("a", None)], PROMPT) == []
    assert await chosen(one, [replica("a", None), replica("b")], PROMPT) == ["b"]


async def test_while_none_has_said_so_others_have_their_turn(monkeypatch: Any) -> None:
    one, late = router(), replica("a", None)
    for name, value in {
        "_replicas": {"a": late},
        "_replicas_list": [late],
        "initial_backoff_s": 0.001,
        "backoff_multiplier": 1,
        "max_backoff_s": 0.001,
        "num_routing_tasks_in_backoff": 0,
        "num_routing_tasks_in_backoff_gauge": SimpleNamespace(set=lambda count: None),
    }.items():
        setattr(one, name, value)
    asked = 0
    choose = one.choose_replicas

    async def counted(*arguments: Any, **named: Any) -> list[list[Any]]:
        nonlocal asked
        asked += 1
        assert asked < 1000, "Ray's loop gives nobody else a turn"
        return await choose(*arguments, **named)

    monkeypatch.setattr(one, "choose_replicas", counted)
    found = one._choose_replicas_with_backoff(pending(ReplicaRequest(PROMPT, Counter())))
    first = asyncio.ensure_future(anext(found))
    await asyncio.sleep(0.01)
    assert not first.done()
    late.routing_stats.update({URL: "http://a", BLOCKS: 100})
    assert await first == [late]
    await found.aclose()


async def test_one_that_is_gone_is_forgotten() -> None:
    one = router()
    assert await chosen(one, [replica("a"), replica("b")], PROMPT) == ["a"]
    assert await chosen(one, [replica("b"), replica("c")], OTHER) == ["b"]
    assert await chosen(one, [replica("a"), replica("b")], PROMPT, num_open={"a": 1}) == ["b"]


async def test_a_call_that_is_no_request_goes_anywhere() -> None:
    found = await router().choose_replicas([replica("a"), replica("b")], None)
    assert [len(rank) for rank in found] == [2]


@pytest.mark.parametrize(("counts", "wanted"), [((), 0), ((3.0,), 1), ((16.0, 1.0), 2), ((40,), 3)])
def test_replicas_follow_their_sequences(counts: tuple[float, ...], wanted: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"sequences": dict(enumerate(counts))},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 16),
    )
    assert wanted_replicas(context)[0] == wanted
