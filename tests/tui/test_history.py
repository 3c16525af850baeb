from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.tui.history import CAPACITY, History


def of(*values: float) -> History:
    history = History()
    for value in values:
        history = history.push(value)
    return history


def test_the_oldest_values_leave() -> None:
    history = of(*range(CAPACITY + 5))
    assert len(history.values) == CAPACITY
    assert history.values[0] == 5
    assert history.latest == history.peak == CAPACITY + 4
    assert of().latest == of().peak == 0.0


def test_a_short_history_has_a_column_a_value() -> None:
    assert of(1, 2, 3).columns(10, 300) == [1, 2, 3]
    assert of().columns(10, 300) == []
    assert of(1).columns(0, 300) == []


def test_columns_are_means_and_then_stand_for_more() -> None:
    history = of(*range(1, 21))
    assert history.columns(10, 300) == [1.5 + 2 * at for at in range(10)]
    assert history.columns(10, 10) == list(range(11, 21))


@given(st.integers(1, 60), st.integers(1, 400), st.integers(0, 900))
def test_full_columns_stay_as_they_are(width: int, span: int, count: int) -> None:
    history = of(*(float(value % 17) for value in range(count)))
    columns = history.columns(width, span)
    assert len(columns) <= width
    after = history.push(5.0).columns(width, span)
    if len(after) == len(columns):  # the columns did not move: at most the newest has changed
        assert after[:-1] == columns[:-1] or after[:-2] == columns[1:-1]
