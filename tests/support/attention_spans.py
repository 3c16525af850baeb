"""The spans that the device cuts contexts into, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from appliance.kernels.paged_attention.work import LONG_CONTEXT, LONG_SPAN, MAX_SPANS, MIN_SPAN


def cut(contexts: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Spans of each context and their length, which the last one may fall short of."""
    long = np.where(contexts > LONG_CONTEXT, LONG_SPAN, MIN_SPAN)
    wanted = -(-contexts // MAX_SPANS)
    lengths = np.maximum(long, -(-wanted // MIN_SPAN) * MIN_SPAN)
    return np.maximum(-(-contexts // lengths), 1), lengths


def span_table(contexts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Sequence, first key, last key + 1 and row of partial results of each span: (num_spans, 4)."""
    counts, lengths = cut(contexts)
    sequence = np.repeat(np.arange(len(contexts)), counts)
    row = np.arange(len(sequence))
    index = row - np.repeat(np.cumsum(counts) - counts, counts)
    begin = index * lengths[sequence]
    end = np.minimum(begin + lengths[sequence], contexts[sequence])
    return np.stack((sequence, begin, end, row), axis=1).astype(np.int32)
