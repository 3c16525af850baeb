"""Runs a list of tokens through a decoder without an engine, for tests and evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.arrays import dtype_name
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision, precisions
from appliance.kernels.rows.ragged import AdapterRows, RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.executor import AnyCache, Executor

BLOCK_SIZE = 32  # supported by the kernels of every backend
_UNQUANTIZED = {
    "float32": KVFormat.FP32,
    "float16": KVFormat.FP16,
    "bfloat16": KVFormat.BF16,
}


def logits_of(
    decoder: Executor[AnyCache],
    token_ids: Sequence[int],
    *,
    chunks: Sequence[int] | None = None,
    format: KVFormat | Sequence[LayerPrecision] | None = None,
    block_table: Sequence[int] | None = None,
    adapters: AdapterSlots | None = None,
) -> Tensor:
    """Return logits after each token, teacher-forced: (num_tokens, vocab_size) float32.

    Args:
        chunks: lengths of the steps, which sum to its length; one step by default.
        format: of the KV cache, or of each layer's; by default that of the activations.
        block_table: blocks of the sequence in order; 0, 1, 2, ... by default.
        adapters: the one in slot 0 is used.
    """
    steps = chunks or [len(token_ids)]
    assert sum(steps) == len(token_ids), (steps, len(token_ids))
    return torch.cat(list(_run(decoder, token_ids, steps, format, block_table, adapters)))


def _run(
    decoder: Executor[AnyCache],
    token_ids: Sequence[int],
    steps: Sequence[int],
    format: KVFormat | Sequence[LayerPrecision] | None,
    block_table: Sequence[int] | None,
    adapters: AdapterSlots | None,
) -> Iterator[Tensor]:
    table = tuple(block_table or range(-(-len(token_ids) // BLOCK_SIZE)))
    each = precisions(
        format or _UNQUANTIZED[dtype_name(decoder.dtype)], len(decoder.spec.cache_layers)
    )
    sealed = any(layer.format.is_sealed for layer in each)
    cache = decoder.allocate_cache(
        each,
        num_blocks=max(table) + 1,
        block_size=BLOCK_SIZE,
        num_open=len(table) if sealed else 0,
        num_states=1 if decoder.spec.state_bytes else 0,
    )
    start = 0
    for length in steps:
        end = start + length
        batch = one_sequence(
            table, start, end, decoder.device,
            sealed=sealed,
            state_slot=0 if decoder.spec.state_bytes else None,
        )  # fmt: skip
        if adapters is not None:
            batch = with_adapters(batch, [0] * batch.num_seqs, adapters)
        yield decoder.forward(
            torch.tensor(token_ids[start:end], device=decoder.device),
            torch.arange(start, end, device=decoder.device),
            batch,
            cache,
        )
        start = end


def with_adapters(batch: RaggedBatch, slots: Sequence[int], table: AdapterSlots) -> RaggedBatch:
    """Give each sequence of a batch the adapter in a slot; below 0 none."""
    rows = AdapterRows(torch.tensor(slots, dtype=torch.int32), tuple(slots), table)
    return replace(batch, adapters=rows)


def one_sequence(
    block_table: tuple[int, ...],
    start: int,
    end: int,
    device: torch.device,
    *,
    sealed: bool = False,
    state_slot: int | None = None,
    sees: Sequence[int] | None = None,
) -> RaggedBatch:
    """Build a step of one sequence, position `start` to `end`; each block has an open one."""
    opened = range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)) if sealed else None
    return RaggedBatch.of(
        [end - start],
        [end],
        [block_table],
        block_size=BLOCK_SIZE,
        device=device,
        open_blocks=None if opened is None else [opened],
        state_slots=None if state_slot is None else [state_slot],
        sees=sees,
    )
