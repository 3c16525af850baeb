from __future__ import annotations

from appliance.engine.blocks.block_hashes import block_hash, extend_chain, root_hash


def test_tokens_do_not_run_into_each_other() -> None:
    root = root_hash()
    assert block_hash(root, [1, 256]) != block_hash(root, [257, 0])
    assert block_hash(root, [1]) != block_hash(root, [1, 0])


def test_the_parts_of_a_root_do_not_run_into_each_other() -> None:
    assert len({root_hash(), root_hash("a"), root_hash("a", ""), root_hash("", "a")}) == 4


def test_a_chain_goes_on_from_the_hashes_that_are_there() -> None:
    root, tokens = root_hash("model"), list(range(7))
    whole: list[bytes] = []
    extend_chain(whole, root, tokens, 2, 3)
    begun = whole[:1]
    extend_chain(begun, begun[0], tokens, 2, 3)
    assert begun == whole
    assert whole == [
        (first := block_hash(root, [0, 1])),
        (second := block_hash(first, [2, 3])),
        block_hash(second, [4, 5]),
    ]
