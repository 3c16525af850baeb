"""The ranks' shares: how they divide heads, columns and tokens, and which ones are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.kernels.head_norms import HeadNormKind
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.shard.split import Heads, Split, check_split, cut_heads
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixerSpec,
    NormSpec,
    RopeSpec,
)

NORM, ROPE = NormSpec(1e-5), RopeSpec(1e4, 16)
shares = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def attention(num_heads: int, num_kv_heads: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, 16, 1.0, ROPE)


def delta(num_value_heads: int, num_key_heads: int) -> GatedDeltaSpec:
    return GatedDeltaSpec(num_key_heads, num_value_heads, 32, 48, 4, NORM)


def mamba2(num_heads: int, num_groups: int) -> Mamba2Spec:
    return Mamba2Spec(num_heads, num_groups, 32, 16, 4, NORM)


def model(*mixers: MixerSpec) -> DecoderSpec:
    layers = tuple(LayerSpec(mixer, None, NORM) for mixer in mixers)
    return DecoderSpec("test", 64, 97, 128, layers, NORM, tied_head=True)


@given(shares, st.integers(0, 200))
def test_a_cut_gives_each_rank_a_unit_and_leaves_none(parts: list[int], units: int) -> None:
    bounds = Split(tuple(parts)).cut(units)
    if units < len(parts):
        assert bounds is None
        return
    assert bounds is not None
    assert (bounds[0], bounds[-1], len(bounds)) == (0, units, len(parts) + 1)
    counts = [last - first for first, last in pairwise(bounds)]
    assert min(counts) >= 1
    if units % sum(parts) == 0:
        assert counts == [units // sum(parts) * part for part in parts]


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [("auto", 2, (1, 1)), ("2:1", 2, (2, 1)), ("6:3", 2, (2, 1)), ("1:1:2", 3, (1, 1, 2))],
)
def test_shares_are_read_in_lowest_terms(text: str, size: int, found: tuple[int, ...]) -> None:
    split = Split.parse(size, text)
    assert (split.shares, split.is_exact) == (found, text != "auto")


@pytest.mark.parametrize("text", ["", "2", "2:x", "0:1", "2:-1", "1:2:3", "65:1", "2:1:", "²:1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpu-split.*(auto)"):
        Split.parse(2, text)


def test_whole_groups_go_to_a_rank() -> None:
    assert cut_heads(attention(9, 3), Split((2, 1))) == (Heads(0, 6, 0, 2), Heads(6, 3, 2, 1))


def test_fewer_key_heads_than_ranks_are_in_several() -> None:
    assert cut_heads(attention(4, 1), Split((3, 1))) == (Heads(0, 3, 0, 1), Heads(3, 1, 0, 1))
    four = cut_heads(attention(4, 2), Split((1, 1, 1, 1)))
    assert four is not None
    assert [(heads.count, heads.first_kv) for heads in four] == [(1, 0), (1, 0), (1, 1), (1, 1)]


def test_recurrent_heads_go_to_a_rank_with_their_keys() -> None:
    assert cut_heads(delta(6, 3), Split((2, 1))) == (Heads(0, 4, 0, 2), Heads(4, 2, 2, 1))
    assert cut_heads(delta(4, 1), Split((3, 1))) == (Heads(0, 3, 0, 1), Heads(3, 1, 0, 1))
    assert cut_heads(mamba2(8, 4), Split((1, 1))) == (Heads(0, 4, 0, 2), Heads(4, 4, 2, 2))
    assert cut_heads(mamba2(8, 1), Split((3, 1))) == (Heads(0, 6, 0, 1), Heads(6, 2, 0, 1))


def test_no_rank_reads_two_key_heads_that_others_read_too() -> None:
    assert cut_heads(attention(4, 2), Split((1, 2, 1))) is None
    assert cut_heads(attention(1, 1), Split((1, 1))) is None


def test_shares_that_heads_do_not_divide_by_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"9 heads in 3 groups.*2:1.*or auto") as error:
        check_split(model(attention(9, 3)), Split((1, 1), is_exact=True))
    assert "1:2" in str(error.value)
    check_split(model(attention(9, 3)), Split((2, 1), is_exact=True))
    check_split(model(attention(9, 3)), Split((1, 1)))


def test_all_layers_must_divide() -> None:
    both = model(attention(8, 8), attention(8, 2))
    with pytest.raises(ConfigError, match=r"8 heads in 2 groups.*: 1:1, or auto"):
        check_split(both, Split((3, 1), is_exact=True))


@pytest.mark.parametrize(
    ("mixer", "match"),
    [
        (delta(12, 6), "Gated DeltaNet layers of this model, 12 heads in 6 groups.*: 2:1,"),
        (mamba2(6, 3), "Mamba-2 layers of this model, 6 heads in 3 groups.*: 2:1, 1:2, or auto"),
        (
            LatentAttentionSpec(6, None, 48, 20, 16, 24, 1.0, ROPE, NORM),
            "latent attention of this model, 6 heads; .*: 2:1,",
        ),
    ],
)
def test_recurrent_and_latent_heads_must_divide_too(mixer: MixerSpec, match: str) -> None:
    """Channels of a short convolution may divide unevenly."""
    both = model(attention(12, 12), mixer, mamba2(3, 1), ShortConvSpec(32, 3))
    with pytest.raises(ConfigError, match=match):
        check_split(both, Split((3, 1), is_exact=True))
    check_split(both, Split((2, 1), is_exact=True))


def test_a_model_that_no_shares_divide_says_so() -> None:
    with pytest.raises(ConfigError, match="that do: none"):
        check_split(model(attention(1, 1)), Split((1, 1), is_exact=True))


@pytest.mark.parametrize(("heads", "ranks"), [(32, 7), (64, 16)])
def test_a_refusal_does_not_try_all_splits_of_many_heads(heads: int, ranks: int) -> None:
    """64 heads on 16 ranks have C(63, 15) splits."""
    with pytest.raises(ConfigError, match=f"{heads} heads"):
        check_split(model(attention(heads, heads)), Split((1,) * (ranks - 1) + (9,), is_exact=True))


def test_heads_that_share_a_norm_stay_together() -> None:
    whole = replace(attention(8, 4), qk_norm=NORM, head_norms=HeadNormKind.ALL)
    assert cut_heads(whole, Split((1, 1))) is None
    check_split(model(whole), Split((2, 1), is_exact=True))  # each rank has all of them
