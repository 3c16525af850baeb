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
    """The first position of a span."""
    position = 0
    for begin, end, length in zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=False):
        count = (end - begin) // length
        position += max(min(span, count), 0) * length
        span -= count
    return position


def span_table(
    contexts: Sequence[int], rows: Sequence[int] | None = None, window: int | None = None
) -> NDArray[np.int32]:
    """Spans that nobody shares: sequence, first key, last key + 1, span, its first and last span.

    They are of the last rows of each sequence, one unless `rows` says more.
    """
    table: list[tuple[int, ...]] = []
    for i, context in enumerate(contexts):
        count = rows[i] if rows is not None else 1
        lowest = 0 if window is None else max(context - count - window + 1, 0)
        first, last = span_of(lowest), span_of(max(context - 1, lowest))
        for span in range(first, last + 1):
            begin = max(begin_of(span), lowest // PAGE_TOKENS * PAGE_TOKENS)
            table.append((i, begin, min(begin_of(span + 1), context), span, first, last))
    return np.array(table, dtype=np.int32).reshape(-1, 6)
