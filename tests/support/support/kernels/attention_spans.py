"""What `attention_spans` makes of sequences' lengths, computed plainly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.kernels.attention.work import (
    SPAN_BOUNDS,
    SPAN_LENGTHS,
    span_of,
)
from appliance.kernels.kv_page.layout import PAGE_TOKENS


def begin_of(span: int) -> int:
    """The first position of a span of the usual length."""
    position = 0
    for begin, end, length in zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=False):
        count = (end - begin) // length
        position += max(min(span, count), 0) * length
        span -= count
    return position


def span_table(
    contexts: Sequence[int],
    rows: Sequence[int] | None = None,
    window: int | None = None,
    most: int | None = None,
) -> NDArray[np.int32]:
    """Spans that nobody shares: sequence, first key, last key + 1, span, its first and last span.

    They are of the last rows of each sequence, one unless `rows` says more.
    """
    return _cut(contexts, rows, window, span_factor(contexts, rows, window, most))


def span_factor(
    contexts: Sequence[int],
    rows: Sequence[int] | None = None,
    window: int | None = None,
    most: int | None = None,
) -> int:
    """The least power of two that spans are longer by, for no sequence to have more than `most`."""
    factor = 1
    while most is not None:
        counts = np.bincount(_cut(contexts, rows, window, factor)[:, 0])
        if counts.max(initial=0) <= most:
            break
        factor *= 2
    return factor


def _cut(
    contexts: Sequence[int], rows: Sequence[int] | None, window: int | None, factor: int
) -> NDArray[np.int32]:
    table: list[tuple[int, ...]] = []
    for i, context in enumerate(contexts):
        count = rows[i] if rows is not None else 1
        lowest = 0 if window is None else max(context - count - window + 1, 0)
        first, last = span_of(lowest // factor), span_of(max(context - 1, lowest) // factor)
        for span in range(first, last + 1):
            begin = max(factor * begin_of(span), lowest // PAGE_TOKENS * PAGE_TOKENS)
            end = min(factor * begin_of(span + 1), context)
            table.append((i, begin, end, span, first, last))
    return np.array(table, dtype=np.int32).reshape(-1, 6)
