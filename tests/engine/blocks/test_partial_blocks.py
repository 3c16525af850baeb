"""Hits that end inside a block: copies, blocks that are continued in place, open blocks."""

from __future__ import annotations

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.prefix_cache import Prefix
from appliance.engine.nouns.moves import BlockCopy
from appliance.engine.nouns.plan import Sampled
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits


def sequence(*tokens: int, slot: int = 1) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams())
    return Sequence(request, slot=slot)


def start(blocks: BlockManager, seq: Sequence) -> tuple[BlockCopy, ...]:
    """Attach the hit and compute the rest."""
    blocks.attach(seq, blocks.find_prefix(seq))
    copies = blocks.allocate(seq, seq.num_uncomputed)
    assert copies is not None
    blocks.settle()
    blocks.commit(seq, seq.num_uncomputed)
    return copies


def test_the_block_where_two_prompts_part_is_copied_and_stays_what_it_was() -> None:
    blocks = BlockManager(8, 4)
    first, second = sequence(1, 2, 3, 4, 5, 6, 7, 8), sequence(1, 2, 3, 4, 5, 6, 9, 9, slot=2)
    start(blocks, first)
    (copy,) = start(blocks, second)
    assert copy == BlockCopy(first.block_table[1], second.block_table[1])
    assert second.block_table[0] == first.block_table[0]
    blocks.check_invariants([first, second])
    blocks.free(first)
    blocks.free(second)
    assert blocks.find_prefix(sequence(1, 2, 3, 4, 5, 6, 7, 8, 0)).num_tokens == 8
    assert blocks.find_prefix(sequence(1, 2, 3, 4, 5, 6, 9, 9, 0)).num_tokens == 8
    blocks.check_invariants([])


def test_a_conversation_goes_on_in_the_block_it_ended_in_without_a_copy() -> None:
    blocks = BlockManager(8, 4)
    turn = sequence(1, 2, 3, 4, 5, 6)
    start(blocks, turn)
    last = turn.block_table[1]
    blocks.free(turn)
    assert blocks.num_cached == 2
    again = sequence(1, 2, 3, 4, 5, 6, 7, 8, 9, slot=2)
    assert blocks.find_prefix(again).num_tokens == 6
    assert start(blocks, again) == ()
    assert again.block_table[1] == last
    assert blocks.pool.kv_tokens == 9
    blocks.check_invariants([again])
    blocks.free(again)
    assert blocks.num_cached == 3, "no copy of the old end is left behind"


def test_two_that_go_on_from_one_end_do_not_disturb_each_other() -> None:
    blocks = BlockManager(8, 4)
    turn = sequence(1, 2, 3, 4, 5, 6)
    start(blocks, turn)
    blocks.free(turn)
    a, b = sequence(1, 2, 3, 4, 5, 6, 7, slot=2), sequence(1, 2, 3, 4, 5, 6, 8, slot=3)
    start(blocks, a)
    start(blocks, b)
    assert a.block_table[1] != b.block_table[1]
    blocks.check_invariants([a, b])


def test_what_a_failed_step_was_to_copy_is_not_kept() -> None:
    blocks = BlockManager(8, 4)
    first, second = sequence(1, 2, 3, 4, 5, 6, 7, 8), sequence(1, 2, 3, 4, 5, 6, 9, 9, slot=2)
    start(blocks, first)
    blocks.attach(second, blocks.find_prefix(second))
    assert blocks.allocate(second, 1)
    blocks.settle()
    copied = second.block_table[1]
    blocks.free(second)
    found = blocks.find_prefix(sequence(1, 2, 3, 4, 5, 6, 9, 9))
    assert copied not in found.blocks
    assert blocks.num_cached == 0
    blocks.check_invariants([first])


def test_the_source_of_a_copy_is_nobodys_before_the_plan_is_settled() -> None:
    blocks = BlockManager(4, 4)
    start(blocks, first := sequence(1, 2, 3, 4, 5, 6, 7, 8))
    blocks.free(first)
    second = sequence(1, 2, 3, 4, 5, 6, 9, 9, slot=2)
    blocks.attach(second, blocks.find_prefix(second))
    (copy,) = blocks.allocate(second, 1) or ()
    other = sequence(0, 0, 0, 0, 0, slot=3)
    assert blocks.allocate(other, 5) is None
    assert blocks.allocate(other, 4) == ()
    assert copy.source not in other.block_table
    blocks.settle()
    assert blocks.allocate(other, 5) == ()
    assert copy.source in other.block_table
    blocks.check_invariants([second, other])


def test_ends_are_evicted_before_what_they_follow() -> None:
    blocks = BlockManager(3, 4)
    start(blocks, first := sequence(1, 2, 3, 4, 5, 6, 7, 8, 9))
    tables = list(first.block_table)
    blocks.free(first)
    other = sequence(*range(90, 102), slot=3)
    for expected in reversed(tables):
        assert blocks.allocate(other, len(other.block_table) * 4 + 4) == ()
        assert other.block_table[-1] == expected
        blocks.check_invariants([other])


def test_a_hit_that_needs_a_block_more_than_there_is_is_cut_to_whole_blocks() -> None:
    """Else a prompt that fills the cache would wait for ever beside blocks that it could share."""
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, context_length=64)
    scheduler = Scheduler(BlockManager(4, 4), limits)
    for name, end in (("a", (7, 7, 7)), ("b", (8, 8, 8))):
        prompt = (*range(12), *end)
        sampling = SamplingParams(max_tokens=1)
        scheduler.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None, "admission waits for a block that never comes free"
        scheduler.commit(plan, [Sampled(50)])
        scheduler.check_invariants()
    assert scheduler.stats().prefix_hits_total == 12


def test_where_blocks_are_sealed_an_open_block_is_kept_with_its_block() -> None:
    blocks = BlockManager(8, 4, num_open=4)
    start(blocks, turn := sequence(1, 2, 3, 4, 5, 6))
    ((opened,),) = blocks.open_blocks([]) or ((blocks.pool.open[turn.block_table[1]],),)
    blocks.free(turn)
    blocks.check_invariants([])
    diverging = sequence(1, 2, 3, 4, 5, 9, 9, slot=2)
    (copy,) = start(blocks, diverging)
    assert copy.open_source == opened
    assert copy.open_destination not in (opened, -1)
    going_on = sequence(1, 2, 3, 4, 5, 6, 7, slot=3)
    assert start(blocks, going_on) == ()
    assert blocks.pool.open[going_on.block_table[1]] == opened
    blocks.check_invariants([diverging, going_on])


def test_where_blocks_are_sealed_nothing_is_had_of_a_full_one() -> None:
    blocks = BlockManager(8, 4, num_open=4)
    start(blocks, sequence(1, 2, 3, 4, 5, 6, 7, 8))
    prefix = blocks.find_prefix(sequence(1, 2, 3, 4, 5, 6, 9, 9))
    assert prefix.num_tokens == 4


def test_an_open_block_of_a_cached_block_goes_to_who_runs() -> None:
    blocks = BlockManager(16, 4, num_open=3)
    old, new = sequence(1, 1), sequence(2, 2)
    for seq in (old, new):
        start(blocks, seq)
        blocks.free(seq)
    running = [sequence(5, slot=2), sequence(6, slot=3)]
    for seq in running:
        start(blocks, seq)
    assert blocks.pool.num_evictions == 1
    assert blocks.find_prefix(sequence(1, 1, 1)) == Prefix()
    assert blocks.find_prefix(sequence(2, 2, 2)).num_tokens == 2
    blocks.check_invariants(running)
