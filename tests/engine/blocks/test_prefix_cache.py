from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.blocks.prefix_cache import MAX_COMPARED, PrefixCache, num_common
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence


def sequence_of(tokens: list[int], salt: str = "") -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    return Sequence(request)


def hashes(tokens: list[int], *, salt: str = "", namespace: str = "", size: int = 2) -> list[bytes]:
    sequence = sequence_of(tokens, salt)
    PrefixCache(size, namespace).extend_hashes(sequence, len(tokens) // size)
    return sequence.block_hashes


def keep(cache: PrefixCache, tokens: list[int], size: int, *blocks: int, salt: str = "") -> None:
    """Index blocks of a chain, the last one with as many tokens as are left."""
    sequence = sequence_of(tokens, salt)
    cache.extend_hashes(sequence, len(tokens) // size)
    for index, block in enumerate(blocks):
        cache.add(sequence, index, block, min(size, len(tokens) - index * size))
    cache.check_invariants()


def find(cache: PrefixCache, tokens: list[int], salt: str = "") -> tuple[tuple[int, ...], int]:
    prefix = cache.find(sequence_of(tokens, salt))
    return prefix.blocks, prefix.num_tokens


def test_a_hash_covers_all_that_came_before() -> None:
    first, second = hashes([1, 2, 3, 4])
    assert first != second
    assert hashes([1, 2, 3, 5])[0] == first
    assert hashes([9, 2, 3, 4])[1] != second


def test_chains_differ_by_salt_and_by_namespace() -> None:
    roots = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("\0", "\ud800")]
    chains = [hashes([1, 2], salt=salt, namespace=namespace)[0] for salt, namespace in roots]
    assert len(set(chains)) == len(roots)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(1, 8))
def test_hashes_found_one_by_one_equal_hashes_found_at_once(tokens: list[int], size: int) -> None:
    sequence, cache = sequence_of(tokens, "s"), PrefixCache(size)
    for num_blocks in range(len(tokens) // size + 1):
        cache.extend_hashes(sequence, num_blocks)
    assert sequence.block_hashes == hashes(tokens, salt="s", size=size)


def test_the_first_of_equal_blocks_stays_indexed() -> None:
    cache = PrefixCache(2)
    keep(cache, [1, 2, 3, 4], 2, 5, 6)
    keep(cache, [1, 2], 2, 7)
    assert find(cache, [1, 2, 3, 4, 0]) == ((5, 6), 4)
    assert not cache.is_found(7)
    assert len(cache) == 2
    cache.check_invariants()


def test_a_spare_takes_the_place_of_its_equal_that_is_removed() -> None:
    cache = PrefixCache(2)
    keep(cache, [1, 2, 3, 4], 2, 5, 6)
    keep(cache, [1, 2], 2, 7)
    keep(cache, [1, 2], 2, 8)
    assert cache.remove(5) is None
    assert find(cache, [1, 2, 3, 4, 0])[0][1:] == (6,)
    assert cache.remove(7) is None
    assert find(cache, [1, 2, 3, 4, 0]) == ((8, 6), 4)
    cache.check_invariants()
    assert cache.remove(8) == hashes([1, 2])[0]
    assert find(cache, [1, 2, 3, 4, 0]) == ((), 0)
    cache.check_invariants()


def test_find_stops_at_the_first_gap() -> None:
    cache, tokens = PrefixCache(2), [1, 2, 3, 4, 5, 6]
    keep(cache, tokens, 2, 0, 1, 2)
    cache.remove(1)
    assert find(cache, [*tokens, 0]) == ((0,), 2)
    assert cache.get(hashes(tokens)[2]) == 2
    cache.check_invariants()


def test_a_hit_goes_on_inside_the_block_where_two_sequences_part() -> None:
    cache = PrefixCache(4)
    keep(cache, [1, 2, 3, 4, 5, 6, 7, 8], 4, 0, 1)
    assert find(cache, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == ((0, 1), 6)
    assert find(cache, [1, 2, 9, 9, 9]) == ((0,), 2)
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == ((0, 1), 7), "the last token runs again"
    assert find(cache, [9, 2, 3, 4]) == ((), 0)
    assert find(cache, [1, 2, 9, 9, 9], salt="other") == ((), 0)


def test_a_last_block_is_found_as_far_as_it_was_filled() -> None:
    cache = PrefixCache(4)
    keep(cache, [1, 2, 3, 4, 5, 6], 4, 0, 1)
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ((0, 1), 6)
    assert find(cache, [1, 2, 3, 4, 5, 9, 9, 9]) == ((0, 1), 5)
    cache.remove(1)
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ((0,), 4)
    cache.check_invariants()


def test_of_several_that_follow_the_one_with_most_in_common_is_hit() -> None:
    cache = PrefixCache(4)
    for block, tail in enumerate([[1, 2, 0, 0], [1, 2, 3, 0], [1, 2], [1, 0, 0, 0]]):
        keep(cache, tail, 4, block)
    assert find(cache, [1, 2, 3, 4, 5]) == ((1,), 3)


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    cache = PrefixCache(32)
    keep(cache, list(range(32)), 32, 0)
    assert cache.min_partial == 4
    assert find(cache, [0, 1, 2, *[9] * 40]) == ((), 0)
    assert find(cache, [0, 1, 2, 3, *[9] * 40]) == ((0,), 4)


def test_where_blocks_are_sealed_only_the_tokens_of_open_ones_can_be_had() -> None:
    cache = PrefixCache(4, splits_full=False)
    keep(cache, [1, 2, 3, 4, 5, 6, 7], 4, 0, 1)
    assert find(cache, [1, 2, 3, 9, 9]) == ((), 0)
    assert find(cache, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == ((0, 1), 6)
    cache.remove(0)
    cache.remove(1)
    cache.check_invariants()


def test_no_more_than_a_few_blocks_are_compared_however_many_follow() -> None:
    cache = PrefixCache(8)
    for block in range(1000):
        keep(cache, [1, 2, 3, block, 0, 0, 0, 0], 8, block)
    with patch("appliance.engine.blocks.prefix_cache.num_common", wraps=num_common) as compared:
        assert find(cache, [1, 2, 3, -1, 5])[1] == 3
    assert compared.call_count == MAX_COMPARED
