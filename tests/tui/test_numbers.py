from __future__ import annotations

import pytest

from appliance.tui import numbers


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.00 ms"),
        (0.0001, "0.10 ms"),
        (0.00999, "10.0 ms"),
        (0.0224, "22.4 ms"),
        (0.09996, "100 ms"),
        (0.182, "182 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (9.996, "10.0 s"),
        (99.96, "1:40"),
    ],
)
def test_durations_have_three_digits(seconds: float, words: str) -> None:
    assert numbers.duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-0.1, "0.0 s"),
        (3.24, "3.2 s"),
        (59.96, "1:00"),
        (3599.6, "1:00:00"),
        (3725, "1:02:05"),
        (50 * 3600, "2 d 2 h"),
    ],
)
def test_clocks(seconds: float, words: str) -> None:
    assert numbers.clock(seconds) == words


def test_counts_rates_shares_and_sizes() -> None:
    assert numbers.count(999_999) == "999,999"
    assert numbers.count(12_345_678) == "12.35 M"
    assert numbers.count(2_000_000_000) == "2.00 G"
    assert numbers.rate(87.64) == "87.6"
    assert numbers.rate(12_345.6) == "12,346"
    assert numbers.percent(0.7134) == "71.3 %"
    assert numbers.size(512) == "512 B"
    assert numbers.size(3 * 2**30) == "3.0 GiB"
    assert numbers.size(1000 * 2**20) == "1.0 GiB"
    assert numbers.size(5 * 2**50) == "5120.0 TiB"
    assert numbers.counted(0, "block") == "0 blocks"
    assert numbers.counted(1, "block") == "1 block"
    assert numbers.counted(2_000, "block") == "2,000 blocks"
