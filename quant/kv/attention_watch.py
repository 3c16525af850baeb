"""Records the queries, keys and values that pass through a backend's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.attention.cpu_plan import CpuAttentionWork
from appliance.kernels.kv_cache import KVBlocks
from appliance.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.operations import Backend


class AttentionWatch:
    """Wraps a backend's attention and records its queries, keys and values."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []  # (tokens, num_heads, head_dim) of each row of text
        self.keys: list[Tensor] = []  # (tokens, num_kv_heads, head_dim)
        self.values: list[Tensor] = []

    def on(self, backend: Backend) -> Backend:
        """Return the backend with recorded attention."""
        attend = backend.paged_attention

        def watched(
            query: Tensor,
            cache: AnyLayerCache,
            work: object,
            *,
            scale: float,
            window: int | None = None,
            softcap: float | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            batch = work.batch if isinstance(work, CpuAttentionWork) else work
            assert isinstance(batch, RaggedBatch)
            assert isinstance(cache, KVBlocks)
            self.queries += query.split(batch.host_query_lens)
            parts = zip(batch.block_tables, batch.host_context_lens, strict=True)
            for table, context in parts:
                keys, values = cache.gather(table.tolist(), context, query.dtype)
                self.keys.append(keys)
                self.values.append(values)
            return attend(
                query, cache, work, scale=scale, window=window, softcap=softcap, sinks=sinks
            )

        return replace(backend, paged_attention=watched)

    def take(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return and forget what was recorded since the last call."""
        taken = self.queries, self.keys, self.values
        self.queries, self.keys, self.values = [], [], []
        return taken
