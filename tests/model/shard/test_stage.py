"""Runs of whole layers: which bounds minimize the largest run, and which models are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.kernels.activation import Activation
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.shard.stage import Stage, check_stages, cut_layers, run_bytes
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
    TokenInputSpec,
)

NORM = NormSpec(1e-5)
ATTENTION = AttentionSpec(4, 2, 16, 1.0, RopeSpec(1e4, 16))


def model(*layers: LayerSpec) -> DecoderSpec:
    return DecoderSpec("test", 64, 97, 128, layers, NORM, tied_head=True)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=7),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_no_other_cut_has_a_smaller_largest_run(
    sizes: list[int], shares: list[int], first: int, last: int
) -> None:
    shares = shares[: len(sizes)]

    def largest(bounds: tuple[int, ...]) -> float:
        runs = run_bytes(sizes, bounds, first, last)
        return max(run / share for run, share in zip(runs, shares, strict=True))

    bounds = cut_layers(sizes, shares, first, last)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(sizes), len(shares) + 1)
    assert all(begin < end for begin, end in pairwise(bounds))
    inner = combinations(range(1, len(sizes)), len(shares) - 1)
    others = [largest((0, *cuts, len(sizes))) for cuts in inner]
    assert largest(bounds) == pytest.approx(min(others))


def test_a_large_head_leaves_fewer_layers_to_the_last_rank() -> None:
    assert cut_layers([1] * 8, [1, 1]) == (0, 4, 8)
    assert cut_layers([1] * 8, [1, 1], last=4) == (0, 6, 8)
    assert cut_layers([1] * 9, [2, 1]) == (0, 6, 9)


def test_a_stage_has_the_caches_and_states_of_its_layers() -> None:
    conv = LayerSpec(ShortConvSpec(64, 3), None, NORM)
    attends = LayerSpec(ATTENTION, None, NORM)
    whole = model(attends, conv, attends, conv)
    first, last = (Stage.of(whole, (0, 1, 4), rank) for rank in range(2))
    assert (first.layers, last.layers) == ((0, 1), (1, 4))
    assert (first.cache_layers, last.cache_layers) == (slice(0, 1), slice(1, 2))
    assert (first.spec.state_bytes, last.spec.state_bytes) == (0, whole.state_bytes)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (1, 0, 0, 1)


def test_layers_that_need_more_than_the_stream_are_refused() -> None:
    attends = LayerSpec(ATTENTION, None, NORM)
    reads = LayerSpec(replace(ATTENTION, kv_layer=0), None, NORM)
    with pytest.raises(ConfigError, match=r"layer 1 .* of layer 0; use --tensor-parallel 2"):
        check_stages(model(attends, reads), 2)
    fed = replace(model(attends, attends), token_input=TokenInputSpec(8, 97, Activation.SILU, NORM))
    with pytest.raises(ConfigError, match="from the tokens themselves; use --tensor-parallel 2"):
        check_stages(fed, 2)
    with pytest.raises(ConfigError, match="use --pipeline-parallel 2 or less"):
        check_stages(model(attends, attends), 3)
    check_stages(model(attends, attends), 2)
