from __future__ import annotations

import pytest

from appliance.config import parse_duration, parse_size
from appliance.config.values import show_duration, show_size
from appliance.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2G", 2**31),
        ("2gib", 2**31),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        ("64 K", 65536),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2x", "-1G", "G", "1 000"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_durations() -> None:
    assert parse_duration("90s") == 90
    assert parse_duration(" 1.5H ") == 5400
    assert parse_duration("2w") == 14 * 86400
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration("soon")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (16384, "16 KiB"), (200 << 30, "200 GiB")],
)
def test_sizes_are_shown_as_they_are_written(size: int, text: str) -> None:
    assert show_size(size) == text
    assert parse_size(text.removesuffix("bytes")) == size


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5s"), (90, "90s"), (600, "10m"), (864000, "10d")]
)
def test_durations_are_shown_as_they_are_written(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text
    assert parse_duration(text) == seconds
