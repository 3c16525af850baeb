"""The schemes that exist, and how they change for a width that their groups do not divide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.quant.formats.scheme import GROUP_SIZES, WeightScheme


def test_a_width_that_divides_changes_nothing() -> None:
    scheme = WeightScheme(4, 128, symmetric=True)
    assert scheme.fit(1536) == (scheme, "")


def test_a_width_that_does_not_divide_gets_the_next_smaller_group_and_a_reason() -> None:
    scheme, reason = WeightScheme(4, 128, symmetric=False).fit(576)
    assert scheme == WeightScheme(4, 64, symmetric=False)
    assert reason == "in groups of 64, not 128: 576 inputs do not divide by 128"


def test_a_channel_is_as_wide_as_the_weight() -> None:
    scheme = WeightScheme(8, None)
    assert scheme.fit(576) == (scheme, "")


@pytest.mark.parametrize("group_size", [*GROUP_SIZES, None])
def test_a_width_that_no_group_divides_stays_dense(group_size: int | None) -> None:
    scheme, reason = WeightScheme(4, group_size).fit(100)
    assert scheme is None
    assert "100 inputs do not divide by 32" in reason


@given(st.sampled_from(GROUP_SIZES), st.integers(1, 1000))
@settings(derandomize=True)
def test_the_fitted_group_is_the_largest_that_divides(group_size: int, blocks: int) -> None:
    in_features = 32 * blocks
    scheme, reason = WeightScheme(4, group_size).fit(in_features)
    assert scheme is not None
    possible = [g for g in GROUP_SIZES if g <= group_size and in_features % g == 0]
    assert scheme.group_size == max(possible)
    assert (reason == "") == (scheme.group_size == group_size)


@pytest.mark.parametrize(
    ("text", "size"), [("64", 64), ("channel", None), (" Channel ", None), ("128", 128)]
)
def test_parse(text: str, size: int | None) -> None:
    parsed = WeightScheme.parse(bits=8, group_size=text, symmetric=False)
    assert parsed == WeightScheme(8, size, symmetric=False)


@pytest.mark.parametrize("text", ["", "-64", "48", "sixty", "6 4", "0", "²", "1e2"])
def test_parse_refuses_other_groups_by_naming_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="32, 64, 128 or channel"):
        WeightScheme.parse(bits=4, group_size=text, symmetric=True)


@pytest.mark.parametrize("bits", [0, 2, 5, 16, -4])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="use 3, 4 or 8"):
        WeightScheme(bits=bits)
