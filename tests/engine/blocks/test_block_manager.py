from __future__ import annotations

import pytest

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import unpack
from appliance.engine.blocks.prefix_cache import Prefix
from appliance.engine.nouns.moves import BlockCopy
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.events import BlockState


def sequence(tokens: range | list[int], *, salt: str = "", slot: int = 1) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    return Sequence(request, slot=slot)


def run(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Give a sequence blocks from the prefix cache and the pool, and compute its tokens."""
    if not seq.block_table:
        blocks.attach(seq, blocks.find_prefix(seq))
    num_tokens = seq.num_uncomputed if num_tokens is None else num_tokens
    assert blocks.allocate(seq, num_tokens) is not None
    blocks.settle()
    blocks.commit(seq, num_tokens)


def hits(blocks: BlockManager, seq: Sequence) -> list[int]:
    """Full blocks that are hit."""
    prefix = blocks.find_prefix(seq)
    return list(prefix.blocks[: prefix.num_tokens // blocks.block_size])


def test_blocks_are_taken_on_demand() -> None:
    blocks = BlockManager(8, 4)
    seq = sequence(range(6))
    run(blocks, seq, 3)
    assert len(seq.block_table) == 1
    run(blocks, seq, 1)
    assert len(seq.block_table) == 1
    run(blocks, seq, 1)
    assert len(seq.block_table) == 2
    assert blocks.num_active == 2
    assert blocks.pool.kv_tokens == 5
    blocks.check_invariants([seq])


def test_no_free_block_is_an_answer_and_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    first, second = sequence(range(8)), sequence(range(100, 108), slot=2)
    run(blocks, first)
    assert blocks.allocate(second, 5) is None
    assert not second.block_table
    assert blocks.num_free_blocks == 1
    assert blocks.allocate(second, 4) == ()
    blocks.check_invariants([first, second])


def test_a_hit_never_covers_the_last_token() -> None:
    blocks = BlockManager(8, 4)
    run(blocks, first := sequence(range(8)))
    same, longer = sequence(range(8)), sequence(range(9))
    assert blocks.find_prefix(same) == Prefix(tuple(first.block_table), 7)
    assert blocks.find_prefix(longer) == Prefix(tuple(first.block_table), 8)


def test_only_what_is_computed_can_be_found() -> None:
    blocks = BlockManager(8, 4)
    first, second = sequence(range(12)), sequence(range(12))
    blocks.find_prefix(first)
    blocks.allocate(first, 12)
    assert blocks.find_prefix(second) == Prefix()
    blocks.commit(first, 7)
    assert blocks.find_prefix(second) == Prefix(tuple(first.block_table[:1]), 4)
    blocks.free(first)
    assert blocks.find_prefix(second) == blocks.find_prefix(first)
    assert blocks.find_prefix(second).num_tokens == 7
    assert blocks.num_cached == 2


@pytest.mark.parametrize("salt", ["other", "\0", "''"])
def test_no_hit_across_salts(salt: str) -> None:
    blocks = BlockManager(8, 4)
    run(blocks, sequence(range(8)))
    assert blocks.find_prefix(sequence(range(9), salt=salt)) == Prefix()
    assert len(hits(blocks, sequence(range(9)))) == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = BlockManager(8, 4, prefix_caching=False)
    run(blocks, seq := sequence(range(9)))
    assert blocks.find_prefix(sequence(range(9))) == Prefix()
    blocks.free(seq)
    assert blocks.num_cached == 0
    assert seq.block_hashes == []
    blocks.check_invariants([])


def test_least_recently_used_content_goes_first_and_tail_before_head() -> None:
    blocks = BlockManager(4, 4)
    old, new = sequence(range(8)), sequence(range(50, 58), slot=2)
    run(blocks, old)
    run(blocks, new)
    (old_head, old_tail), (new_head, new_tail) = old.block_table, new.block_table
    blocks.free(old)
    blocks.free(new)
    other = sequence(range(90, 106), slot=3)
    for expected in (old_tail, old_head, new_tail, new_head):
        assert blocks.allocate(other, len(other.block_table) * 4 + 4) == ()
        assert other.block_table[-1] == expected
    assert blocks.pool.num_evictions == 4
    blocks.check_invariants([other])


def test_a_hit_makes_content_recent_again() -> None:
    blocks = BlockManager(3, 4)
    used, unused = sequence(range(4)), sequence(range(50, 54))
    run(blocks, used)
    run(blocks, unused)
    blocks.free(used)
    blocks.free(unused)
    again = sequence(range(5))
    run(blocks, again)
    blocks.free(again)
    run(blocks, sequence(range(90, 98)))
    assert hits(blocks, sequence(range(50, 55))) == []
    assert len(hits(blocks, sequence(range(5)))) == 1


def test_a_chain_whose_head_another_sequence_indexed_is_evicted_from_its_tail() -> None:
    blocks = BlockManager(6, 2)
    first, second = sequence([1, 2, 3]), sequence([1, 2, 5, 6], slot=2)
    # Both miss, so both compute the head; only the first copy is indexed.
    for seq in (first, second):
        assert blocks.find_prefix(seq) == Prefix()
    run(blocks, first)
    assert blocks.allocate(second, 4) == ()
    blocks.commit(second, 4)
    blocks.free(first)
    blocks.free(second)
    assert blocks.num_cached == 3
    probe = sequence([1, 2, 5, 6, 0])
    assert len(hits(blocks, probe)) == 2
    filler = sequence(range(70, 80), slot=3)
    assert blocks.allocate(filler, 10) == ()
    assert len(hits(blocks, probe)) == 1, "the head went before the tail"


def test_content_that_lost_its_indexed_block_is_indexed_again_by_its_twin() -> None:
    blocks = BlockManager(6, 2)
    first, second = sequence([1, 2, 3]), sequence([1, 2, 5, 6], slot=2)
    run(blocks, first)
    assert blocks.allocate(second, 4) == ()
    blocks.commit(second, 4)
    blocks.free(first)
    filler = sequence(range(70, 78), slot=3)
    assert blocks.allocate(filler, 8) == ()  # evicts the first copy of the head
    blocks.free(second)
    assert len(hits(blocks, sequence([1, 2, 5, 6, 0]))) == 2
    blocks.check_invariants([filler])


def test_a_fork_copies_the_shared_last_block_on_the_first_write_only() -> None:
    blocks = BlockManager(8, 4)
    parent, child = sequence(range(6)), sequence(range(7), slot=2)
    run(blocks, parent)
    shared = list(parent.block_table)
    blocks.fork(parent, child, 6)
    assert list(child.block_table) == shared
    assert blocks.pool.num_shared == 2
    assert blocks.num_active == 2
    copies = blocks.allocate(child, 1)
    assert copies == (BlockCopy(source=shared[1], destination=child.block_table[1]),)
    blocks.commit(child, 1)
    assert list(parent.block_table) == shared
    assert child.block_table[0] == shared[0]
    assert blocks.pool.num_shared == 1
    parent.token_ids.append(9)
    assert blocks.allocate(parent, 1) == (), "it is alone on its last block now"
    blocks.commit(parent, 1)
    assert blocks.pool.kv_tokens == 4 + 3 + 3
    blocks.check_invariants([parent, child])


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    blocks = BlockManager(8, 4)
    parent, child = sequence(range(6)), sequence(range(5), slot=2)
    run(blocks, parent)
    blocks.fork(parent, child, 4)
    assert child.block_table == parent.block_table[:1]
    assert blocks.allocate(child, 1) == ()
    blocks.check_invariants([parent, child])


def test_findable_content_is_copied_even_by_its_only_holder() -> None:
    blocks = BlockManager(8, 4)
    parent, child = sequence(range(4)), sequence([0, 1, 2, 77], slot=2)
    run(blocks, parent)
    blocks.fork(parent, child, 3)
    blocks.free(parent)
    (copy,) = blocks.allocate(child, 1) or ()
    blocks.commit(child, 1)
    blocks.settle()
    assert hits(blocks, sequence(range(5))) == [copy.source]
    blocks.check_invariants([child])


def test_a_copy_needs_a_free_block() -> None:
    blocks = BlockManager(2, 4)
    parent, child = sequence(range(6)), sequence(range(7), slot=2)
    run(blocks, parent)
    blocks.fork(parent, child, 6)
    assert blocks.allocate(child, 1) is None
    assert child.block_table == parent.block_table
    blocks.check_invariants([parent, child])


def test_cost_of_admission_is_what_admission_takes() -> None:
    blocks = BlockManager(10, 4)
    holder, gone = sequence(range(8)), sequence(range(16), slot=2)
    run(blocks, gone)
    blocks.free(gone)
    run(blocks, holder)
    seq = sequence(range(20), slot=3)
    prefix = blocks.find_prefix(seq)
    cost = blocks.cost_of_admission(seq, prefix)
    before = blocks.num_free_blocks
    run(blocks, seq)
    assert before - blocks.num_free_blocks == cost
    assert cost == 4  # one of the hits is active already; three more, and one new


def test_metadata_follows_a_block_through_its_life() -> None:
    blocks = BlockManager(3, 2)
    first, second = sequence([1, 2, 3], slot=4), sequence([1, 2, 8], slot=9)

    def head() -> tuple[int, int, int]:
        fields = unpack(blocks.metadata.words)
        return int(fields.state[0]), int(fields.references[0]), int(fields.owner[0])

    assert head() == (BlockState.FREE, 0, 0)
    run(blocks, first)
    assert head() == (BlockState.ACTIVE, 1, 4)
    run(blocks, second)
    assert head() == (BlockState.ACTIVE, 2, 9)
    blocks.free(second)
    assert head() == (BlockState.ACTIVE, 1, 0)
    blocks.free(first)
    assert head() == (BlockState.CACHED, 0, 0)
    run(blocks, sequence(range(20, 26), slot=5))
    assert head() == (BlockState.ACTIVE, 1, 5)


def test_appending_a_token_writes_no_metadata() -> None:
    blocks = BlockManager(4, 4)
    run(blocks, seq := sequence([1]))
    before = blocks.metadata.words.tolist()
    blocks.metadata.begin_step(5)
    seq.token_ids.append(2)
    run(blocks, seq)
    assert blocks.metadata.words.tolist() == before


def test_a_block_is_being_written_until_it_is_full_or_shared() -> None:
    blocks = BlockManager(4, 2)
    parent, child = sequence([1, 2, 3], slot=1), sequence([1, 2, 3, 4], slot=2)

    def states() -> list[int]:
        return [int(state) for state in unpack(blocks.metadata.words).state[:2]]

    run(blocks, parent)
    assert states() == [BlockState.ACTIVE, BlockState.WRITING]
    blocks.fork(parent, child, 3)
    assert states() == [BlockState.ACTIVE, BlockState.ACTIVE]
    blocks.free(parent)
    assert states() == [BlockState.ACTIVE, BlockState.WRITING]
    run(blocks, child)
    assert states() == [BlockState.ACTIVE, BlockState.ACTIVE]
    blocks.check_invariants([child])
