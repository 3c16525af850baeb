from __future__ import annotations

import torch

from appliance.kernels.block_copy import reference
from appliance.kernels.block_copy.launch import BlockMover
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat


def filled_layers() -> list[KVPages]:
    """Layers of unlike sizes, as in models that mix attention kinds."""
    layers = [
        KVPages.allocate(
            KVFormat.INT4,
            num_blocks=6,
            block_size=32,
            num_kv_heads=heads,
            head_dim=head_dim,
            device=torch.device("cpu"),
        )
        for heads, head_dim in [(2, 64), (1, 80), (3, 256)]
    ]
    random = torch.Generator().manual_seed(0)
    for layer in layers:
        layer.pages.random_(0, 256, generator=random)
    return layers


def assert_same(found: list[KVPages], expected: list[KVPages]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.pages, other.pages)


def test_copy_is_the_references() -> None:
    found, expected = filled_layers(), filled_layers()
    BlockMover(found).copy([4, 1], [0, 3])
    reference.copy_blocks(expected, [4, 1], [0, 3])
    assert_same(found, expected)
    assert not torch.equal(found[0].pages, filled_layers()[0].pages)


def test_blocks_go_out_and_come_back_elsewhere() -> None:
    found, expected = filled_layers(), filled_layers()
    mover = BlockMover(found)
    staging, same = (torch.zeros((2, mover.block_bytes), dtype=torch.uint8) for _ in range(2))
    mover.swap_out([5, 2], staging)
    reference.swap_out(expected, [5, 2], same)
    assert torch.equal(staging, same)
    assert staging.any(1).all()
    mover.swap_in(staging, [0, 1])
    reference.swap_in(expected, same, [0, 1])
    assert_same(found, expected)


def test_nothing_to_move() -> None:
    layers = filled_layers()
    BlockMover(layers).copy([], [])
    assert_same(layers, filled_layers())
