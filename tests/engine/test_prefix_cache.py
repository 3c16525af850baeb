from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.prefix_cache import PrefixCache, block_hash, root_hash
from appliance.engine.request import Request, SamplingParams
from appliance.engine.sequence import Sequence


def hashes(tokens: list[int], *, salt: str = "", namespace: str = "", size: int = 2) -> list[bytes]:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    sequence = Sequence(request)
    PrefixCache(size, namespace).extend_hashes(sequence, len(tokens) // size)
    return sequence.block_hashes


def test_a_hash_covers_all_that_came_before() -> None:
    first, second = hashes([1, 2, 3, 4])
    assert first != second
    assert hashes([1, 2, 3, 5])[0] == first
    assert hashes([9, 2, 3, 4])[1] != second


def test_chains_differ_by_salt_and_by_namespace() -> None:
    roots = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("\0", "\ud800")]
    chains = [hashes([1, 2], salt=salt, namespace=namespace)[0] for salt, namespace in roots]
    assert len(set(chains)) == len(roots)
    assert root_hash("a") != root_hash("a", "")


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(1, 8))
def test_hashes_found_one_by_one_equal_hashes_found_at_once(tokens: list[int], size: int) -> None:
    request = Request(
        request_id="r", prompt_token_ids=tuple(tokens), sampling=SamplingParams(), cache_salt="s"
    )
    sequence, cache = Sequence(request), PrefixCache(size)
    for num_blocks in range(len(tokens) // size + 1):
        cache.extend_hashes(sequence, num_blocks)
    assert sequence.block_hashes == hashes(tokens, salt="s", size=size)


def test_tokens_do_not_run_into_each_other() -> None:
    root = root_hash()
    assert block_hash(root, [1, 256]) != block_hash(root, [257, 0])
    assert block_hash(root, [1]) != block_hash(root, [1, 0])


def test_the_first_of_equal_blocks_stays_indexed() -> None:
    cache, content = PrefixCache(2), hashes([1, 2, 3, 4])
    cache.add(content[0], 5)
    cache.add(content[1], 6)
    cache.add(content[0], 7)
    assert cache.find(content) == [5, 6]
    assert 7 not in cache
    assert len(cache) == 2
    cache.check_invariants()


def test_find_stops_at_the_first_gap() -> None:
    cache, content = PrefixCache(2), hashes([1, 2, 3, 4, 5, 6])
    for block, key in enumerate(content):
        cache.add(key, block)
    cache.remove(1)
    assert cache.find(content) == [0]
    assert cache.get(content[2]) == 2
    cache.check_invariants()
