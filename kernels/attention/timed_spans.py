"""Names the lengths of spans that are worth timing, see `gpu.timed`, and plans with the fastest.

A span is one program's share of the keys of a decode row: short ones keep more of the card at work
for one stream, long ones leave fewer partial results to merge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.attention.launch import paged_attention, plan_attention
from appliance.kernels.attention.work import SPAN_BOUNDS, SPAN_LENGTHS
from appliance.kernels.cache.decoder_cache import allocate_layer
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.kernels.rows.ragged import RaggedBatch

if TYPE_CHECKING:
    from appliance.kernels.attention.work import AttentionWork

STEP = 128  # of a length, which no tile of keys straddles
MOST_BYTES = 256 << 20  # of the keys and values that are read to time a length
COLD_BYTES = 128 << 20  # of different ones, so that each launch reads them from memory
MOST_CACHES = 8


@dataclass(frozen=True, slots=True)
class SpanPlanner:
    """Plans attention with lengths that were timed, or else computed; see `plan_attention`."""

    timed: TimedChoices = field(default_factory=TimedChoices, compare=False)

    def __call__(self, batch: RaggedBatch, block_size: int) -> AttentionWork:
        return plan_attention(batch, block_size, self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of spans, between SPAN_BOUNDS."""
        known = self.timed.entries
        found = []
        for end, length in zip(SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=True):
            found.append((known[end].keys if end in known else None) or length)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """Attention of one answer's row; see `Timeable`. Entries are the ends of SPAN_BOUNDS.

    Attributes:
        planner: of the model, whose layers have the same spans.
        kv_format: of the cache.
        num_heads: of queries.
        context_length: of the model.
    """

    planner: SpanPlanner
    kv_format: KVFormat
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float | None
    context_length: int

    @property
    def name(self) -> str:
        heads = f"{self.num_heads} on {self.num_kv_heads} heads of {self.head_dim}"
        cap = "" if self.softcap is None else ", capped"
        return f"attention of {heads}, {self.kv_format.value}{cap}"

    @property
    def has_splits(self) -> bool:
        return False

    def entries(self, most_rows: int) -> tuple[int, ...]:
        """See `Timeable`; contexts without an end, or that take much memory, stay computed."""
        del most_rows  # a row of an answer, whatever else a step has
        return tuple(
            end
            for begin, end in pairwise(SPAN_BOUNDS[:-1])
            if begin < self.context_length and self._bytes(end) <= MOST_BYTES
        )

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        if best is not None:
            return (best,)
        level = SPAN_BOUNDS.index(entry) - 1
        own, room = SPAN_LENGTHS[level], entry - SPAN_BOUNDS[level]
        tried = (own, own // 2, own * 2)
        return tuple(LaunchChoice(keys=n) for n in tried if n % STEP == 0 and room % n == 0)

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        self.planner.timed.take(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return a query, caches of several layers with its context, and the step."""
        context = min(entry, self.context_length)
        pages = -(-context // PAGE_TOKENS)
        count = min(MOST_CACHES, max(1, COLD_BYTES // self._bytes(entry)))
        caches = [
            allocate_layer(
                KVPages.allocate,
                LayerPrecision(self.kv_format),
                num_blocks=pages,
                block_size=PAGE_TOKENS,
                num_open=1,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                device=device,
            )
            for _ in range(count)
        ]
        batch = RaggedBatch.of(
            [1],
            [context],
            [range(pages)],
            block_size=PAGE_TOKENS,
            device=device,
            open_blocks=[[0]] if self.kv_format.is_sealed else None,
        )
        query = torch.randn(1, self.num_heads, self.head_dim, dtype=dtype, device=device)
        return query, caches, batch

    def run(self, *inputs: Any) -> object:
        query, caches, batch = inputs
        work = self.planner(batch, PAGE_TOKENS)
        return [
            paged_attention(query, cache, work, scale=self.head_dim**-0.5, softcap=self.softcap)
            for cache in caches
        ]

    def _bytes(self, entry: int) -> int:
        tokens = min(entry, self.context_length)
        each = KVPages.bytes_per_token(self.kv_format, self.num_kv_heads, self.head_dim)
        return int(tokens * each)
