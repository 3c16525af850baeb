from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.tui.history import CAPACITY, History
from appliance.tui.widgets.sparkline import sparkline


def test_the_newest_value_is_at_the_right() -> None:
    assert sparkline([9.0, 0.0, 4.0, 8.0], 3, 1, top=8.0) == [" ▄█"]
    assert sparkline([8.0], 4, 2, top=8.0) == ["   █", "   █"]
    assert sparkline([], 3, 1, top=0.0) == ["   "]


def test_what_is_not_zero_is_seen() -> None:
    assert sparkline([0.001], 1, 2, top=1000.0) == [" ", "▁"]


@given(
    st.lists(st.floats(0, 1e9), max_size=50), st.integers(0, 40), st.integers(0, 5), st.floats(0, 9)
)
def test_it_has_the_size_asked_for(
    values: list[float], width: int, height: int, top: float
) -> None:
    lines = sparkline(values, width, height, top)
    assert [len(line) for line in lines] == [width] * height


@given(st.lists(st.floats(0, 100), max_size=2 * CAPACITY))
def test_history_keeps_the_last_values(values: list[float]) -> None:
    history = History()
    for value in values:
        history = history.push(value)
    assert history.values == tuple(values[-CAPACITY:])
    assert history.peak == max(history.values, default=0.0)
