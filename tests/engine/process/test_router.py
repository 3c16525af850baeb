"""The choice of a replica: by the content of its cache, within the bound on load."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.prefix_cache import PrefixCache
from appliance.engine.nouns.request import AdapterRef, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.process.router import (
    SLACK,
    KnownPrompts,
    ReplicaLoad,
    ReplicaRouter,
    bound,
    prompt_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

SIZE = 4
ids = itertools.count()


def request(prompt: Sequences[int], **fields: Any) -> Request:
    return Request(
        request_id=str(next(ids)),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        **fields,
    )


def router_of(*num_blocks: int) -> ReplicaRouter[int]:
    router = ReplicaRouter[int]()
    for replica, blocks in enumerate(num_blocks):
        router.begin(replica, blocks)
    return router


def routed(router: ReplicaRouter[int], asked: Request, loads: Sequences[ReplicaLoad | None]) -> int:
    able = {replica: load for replica, load in enumerate(loads) if load is not None}
    return router.route(prompt_hashes(asked, SIZE), able)


IDLE = [ReplicaLoad(), ReplicaLoad()]


def test_a_conversation_stays_where_it_began_and_another_begins_elsewhere() -> None:
    router, system = router_of(100, 100), list(range(40))
    talks = [[*system, *range(100 * who, 100 * who + 8)] for who in (1, 2)]
    busy = [ReplicaLoad(1), ReplicaLoad(0)]
    assert routed(router, request(talks[0]), IDLE) == 0
    assert routed(router, request(talks[1]), busy) == 1, "it shares the system prompt, and is new"
    for turn in range(5):
        for who, talk in enumerate(talks):
            talk += range(1000 * (1 + turn), 1000 * (1 + turn) + 6)
            assert routed(router, request(talk), [ReplicaLoad(2), ReplicaLoad(2)]) == who
            assert (
                routed(
                    router, request(talk), [ReplicaLoad(SLACK), ReplicaLoad()] if who == 0 else IDLE
                )
                == who
            )


def test_a_replica_beyond_the_bound_is_passed_over() -> None:
    router, prompt = router_of(100, 100), range(40)
    assert routed(router, request(prompt), IDLE) == 0
    assert routed(router, request(prompt), [ReplicaLoad(bound(2)), ReplicaLoad(2)]) == 0
    assert routed(router, request(prompt), [ReplicaLoad(bound(2) + 1), ReplicaLoad(2)]) == 1
    assert routed(router, request(prompt), [ReplicaLoad(3), ReplicaLoad(3)]) == 0, (
        "both know it: in their turns"
    )
    assert routed(router, request(prompt), [ReplicaLoad(3), ReplicaLoad(3)]) == 1


def test_what_is_new_goes_to_the_least_loaded_then_in_turns() -> None:
    router = router_of(100, 100, 100)
    new = (request(range(100 * n, 100 * n + 20)) for n in itertools.count(1))
    assert routed(router, next(new), [ReplicaLoad(2), ReplicaLoad(1), ReplicaLoad(2)]) == 1
    assert [routed(router, next(new), [ReplicaLoad()] * 3) for _ in range(6)] == [0, 2, 1, 0, 2, 1]


def test_salt_and_adapter_part_equal_prompts() -> None:
    router, prompt = router_of(100, 100), range(40)
    old, new = (AdapterRef("a", "/a", stamp) for stamp in ("1", "2"))
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"adapter": old}, {"adapter": new}]
    chains = [prompt_hashes(request(prompt, **kind), SIZE) for kind in kinds]
    assert len({chain[0] for chain in chains}) == 4
    assert routed(router, request(prompt, adapter=old), IDLE) == 0
    assert routed(router, request(prompt, adapter=new), IDLE) == 1, "another version of its files"
    assert routed(router, request(prompt, adapter=old), IDLE) == 0


def test_who_restarts_is_forgotten_and_who_is_away_gets_nothing() -> None:
    router, prompt = router_of(100, 100), range(40)
    assert routed(router, request(prompt), IDLE) == 0
    assert routed(router, request(prompt), [None, ReplicaLoad(50)]) == 1
    router.begin(1, 100)
    assert router.known(1) == 0
    assert routed(router, request(prompt), [ReplicaLoad(SLACK), ReplicaLoad()]) == 0


def test_replicas_come_and_go() -> None:
    router, prompt = router_of(100, 100), range(40)
    assert routed(router, request(prompt), IDLE) == 0
    router.end(0)
    router.begin(7, 100)
    hashes = prompt_hashes(request(prompt), SIZE)
    loads = {1: ReplicaLoad(1), 7: ReplicaLoad()}
    assert router.route(hashes, loads) == 7
    assert router.route(hashes, loads) == 7, "now it knows the prompt"
    router.end(7)
    router.begin(7, 100)
    assert router.route(hashes, {1: ReplicaLoad(), 7: ReplicaLoad(1)}) == 1


def test_who_sleeps_is_woken_only_beyond_the_bound() -> None:
    router = router_of(100, 100)
    chosen = []
    for count in range(8):
        loads = [ReplicaLoad(count), ReplicaLoad(is_awake=False)]
        chosen.append(routed(router, request(range(100 * count, 100 * count + 20)), loads))
    assert chosen == [0] * (SLACK + 1) + [1] * (7 - SLACK)


def test_without_a_prefix_cache_only_load_counts() -> None:
    router, prompt = router_of(0, 0), range(40)
    assert not router.uses_hashes
    assert [routed(router, request(prompt), IDLE) for _ in range(4)] == [0, 1, 0, 1]


def test_a_record_forgets_the_end_of_what_was_used_longest_ago() -> None:
    record = KnownPrompts(4)
    record.add([b"a", b"b", b"c"])
    record.add([b"a", b"x"])
    assert (len(record), record.match([b"a", b"b", b"c"])) == (4, 3)
    record.add([b"a", b"x", b"y"])
    assert record.match([b"a", b"b", b"c"]) == 2
    assert record.is_end([b"a", b"x", b"y", b"z"], 3)
    assert not record.is_end([b"a", b"q"], 1), "others go on there"
    record.add([bytes([n]) for n in range(9)])
    assert (len(record), record.match([b"a"])) == (4, 0), "a long one is noted as far as it fits"


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
# Each request has a prompt; some running requests end before the next one arrives.
arrivals = st.lists(
    st.tuples(prompts, st.integers(1, 3), st.lists(st.booleans(), max_size=6)), max_size=60
)


@given(arrivals, st.integers(2, 4), st.integers(0, 12))
def test_no_replica_is_given_more_than_the_bound(
    arrivals: list[tuple[list[int], int, list[bool]]], num_replicas: int, num_blocks: int
) -> None:
    router = router_of(*[num_blocks] * num_replicas)
    running: list[tuple[int, int]] = []
    for prompt, width, ends in arrivals:
        ended = {place for place, has_ended in enumerate(ends) if has_ended}
        running = [one for place, one in enumerate(running) if place not in ended]
        counts = [sum(n for at, n in running if at == one) for one in range(num_replicas)]
        chosen = routed(router, request(prompt), [ReplicaLoad(count) for count in counts])
        assert counts[chosen] <= bound(min(counts))
        assert all(router.known(one) <= num_blocks for one in range(num_replicas))
        running.append((chosen, width))


@given(st.lists(prompts, min_size=20, max_size=80), st.integers(2, 4))
def test_none_starves_while_nothing_ends(asked: list[list[int]], num_replicas: int) -> None:
    router, counts = router_of(*[50] * num_replicas), [0] * num_replicas
    for prompt in asked:
        counts[routed(router, request(prompt), [ReplicaLoad(count) for count in counts])] += 1
    assert max(counts) <= bound(min(counts)) + 1
    assert len(asked) <= (SLACK + 1) * num_replicas or min(counts) > 0


@given(prompts, st.sampled_from(["", "x"]), st.booleans())
def test_hashes_are_those_of_the_prefix_cache(prompt: list[int], salt: str, adapted: bool) -> None:
    adapter = AdapterRef("a", "/a", "1", digest="d") if adapted else None
    asked = request(prompt, cache_salt=salt, adapter=adapter)
    sequence, cache = Sequence(asked), PrefixCache(SIZE)
    cache.extend_hashes(sequence, len(prompt) // SIZE)
    assert prompt_hashes(asked, SIZE) == sequence.block_hashes


@given(st.lists(prompts, max_size=12))
def test_a_match_is_what_a_cache_that_holds_all_of_it_finds(asked: list[list[int]]) -> None:
    router, blocks = router_of(500), BlockManager(500, SIZE)
    record = router.records[0]
    for prompt in asked:
        sequence = Sequence(request(prompt))
        blocks.index.extend_hashes(sequence, len(prompt) // SIZE)
        found = blocks.index.find_full(sequence.block_hashes)
        assert record.match(prompt_hashes(sequence.request, SIZE)) == len(found)
        routed(router, sequence.request, [ReplicaLoad()])
        assert blocks.allocate(sequence, len(prompt)) is not None
        blocks.commit(sequence, len(prompt))
        blocks.free(sequence)
