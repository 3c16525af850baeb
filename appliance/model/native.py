"""The executor on the CPU library: a whole ragged step in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.cache import NativeCache
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.structs import BatchStruct
from appliance.model.executor import heads_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.structs import ModelStruct
    from appliance.kernels.kv_cache import KVFormat, LayerPrecision
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.spec import DecoderSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class NativeDecoder:
    """A model in the library's layout; activations are float32 throughout.

    Attributes:
        spec: what it computes.
        dtype: of weights that are not packed.
        engine: threads and workspace.
        model: points into `arena`.
        arena: the weights.
        weight_format: in words.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    engine: NativeEngine
    model: ModelStruct
    arena: Arena
    weight_format: str

    @property
    def device(self) -> torch.device:
        """Where tensors of a step are."""
        return CPU

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.arena.nbytes

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
    ) -> NativeCache:
        """Fresh blocks for every layer."""
        return NativeCache(
            self.engine.library,
            format,
            heads_of(self.spec),
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step; see `Executor.forward`.

        Raises:
            MemoryError: the step needs more workspace than there is.
        """
        num_rows = len(token_ids) if rows is None else len(rows)
        logits = torch.empty((num_rows, self.spec.vocab_size), dtype=torch.float32)
        struct = BatchStruct(
            num_tokens=len(token_ids),
            num_seqs=batch.num_seqs,
            table_width=batch.block_tables.shape[1],
            num_rows=num_rows,
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            # An empty tensor has no address, and without one all rows are meant.
            rows=None if rows is None else rows.data_ptr() or token_ids.data_ptr(),
            open_pages=None if batch.sealed is None else batch.sealed.open_tables.data_ptr(),
        )
        check(
            self.engine.library.ap_step(
                self.engine.handle,
                ctypes.byref(self.model),
                ctypes.byref(cache.struct),
                ctypes.byref(struct),
                logits.data_ptr(),
            )
        )
        return logits
