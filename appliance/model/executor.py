"""Protocols of a `DecoderSpec`'s executors: the torch decoder and the CPU library."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.spec import DecoderSpec


class Cache(Protocol):
    """All physical blocks of all layers, in the executor's own layout."""

    @property
    def block_size(self) -> int: ...

    @property
    def states(self) -> Tensor:
        """State slots of recurrent layers, (num_slots, state_bytes) uint8."""
        ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def open_bytes(self) -> int:
        """Bytes of an open block in all layers; 0 if no layer is sealed."""
        ...

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        """Return a block's bytes, and those of its open block if given, for host memory."""
        ...

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write back the bytes of `read_block`."""
        ...

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks, for copy-on-write."""
        ...

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open blocks, which only sealed layers have."""
        ...


AnyCache = TypeVar("AnyCache", bound=Cache)


class Executor(Protocol[AnyCache]):
    """A loaded model; it holds no cache.

    Attributes:
        dtype: of activations and of unpacked weights.
        is_enqueued: True if a step is enqueued as a whole: no layer waits for the choice of its
            experts, except through `HostCalls`.
        weight_bytes: of the weights as laid out.
        weight_format: in words, such as "4 bits (groups of 32), head 8 bits".
    """

    @property
    def spec(self) -> DecoderSpec: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_enqueued(self) -> bool: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def weight_format(self) -> str: ...

    def adapter_slots(
        self, targets: Mapping[str, AdapterTarget], count: int, most_ranks: int
    ) -> AdapterSlots:
        """Allocate slots for adapters.

        Args:
            targets: the linears that adapters may change, see `adapter_targets`.
            most_ranks: largest rank of an adapter.
        """
        ...

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
    ) -> AnyCache:
        """Allocate blocks for attention layers, open blocks for sealed ones, and state slots."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: AnyCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step and write its keys and values to the cache.

        Args:
            token_ids: (num_tokens,) int64, the rows of all sequences in turn.
            positions: (num_tokens,) int64, each row's position in its sequence.
            batch: maps rows to sequences and their blocks.
            rows: (num_rows,) int64, rows to return logits of, possibly none; None means all.

        Returns:
            Logits, (num_rows, vocab_size) float32.
        """
        ...

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: AnyCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step as `forward` does, up to the head.

        Returns:
            Hidden states after the last norm, (num_rows, hidden_size), in the activations' dtype.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head on rows that `hidden` returned; the result is that of `forward`."""
        ...


def heads_of(spec: DecoderSpec) -> Sequence[tuple[int, int]]:
    """List (num_kv_heads, head_dim) of each layer with its own KV cache."""
    return [(mixer.num_kv_heads, mixer.head_dim) for mixer in spec.cache_layers.values()]


def state_views(spec: DecoderSpec, states: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """View state slots (num_slots, state_bytes) uint8 as each recurrent layer's tensors."""
    dtype = spec.state_format.dtype
    views = []
    for index, offsets in spec.state_offsets.items():
        mixer = spec.recurrent_layers[index]
        views.append(
            tuple(
                states[:, offset : offset + dtype.itemsize * prod(shape)]
                .view(dtype)
                .unflatten(1, shape)
                for offset, shape in zip(offsets, mixer.state, strict=True)
            )
        )
    return tuple(views)
