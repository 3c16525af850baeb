"""The protocols of executors of a `DecoderSpec`: the torch decoder and the CPU library."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.adapters.slots import AdapterSlots
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.spec import DecoderSpec


class Cache(Protocol):
    """All physical blocks of all layers, in a layout that only the executor knows."""

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        ...

    @property
    def states(self) -> Tensor:
        """State slots of recurrent layers, (num_slots, state_bytes) uint8; a row is a state."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        ...

    @property
    def open_bytes(self) -> int:
        """Bytes of one open block in all layers; 0 if none is sealed."""
        ...

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        """Return the bytes of a block, and of its open block if given; for host memory only."""
        ...

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write back the bytes that `read_block` returned."""
        ...

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks, for copy-on-write."""
        ...

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open blocks; without sealed layers there are none."""
        ...


AnyCache = TypeVar("AnyCache", bound=Cache)


class Executor(Protocol[AnyCache]):
    """A loaded model; it holds no cache.

    Attributes:
        dtype: of activations, and of weights that are not packed.
        device: where tensors of a step go.
        is_enqueued: True if a step is enqueued whole: no layer waits to know which experts it
            needs.
        weight_bytes: bytes that the weights take as they are laid out.
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
        """Make room for adapters that steps may use.

        Args:
            targets: the linears that they may change, see `adapter_targets`.
            count: number of slots.
            most_ranks: of an adapter.
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
            rows: (num_rows,) int64, rows whose logits are wanted, possibly none; None means all.

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
            Hidden states under the last norm, (num_rows, hidden_size), in the activations' dtype.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone: what `forward` returns, of some of the rows that `hidden` returned."""
        ...


def heads_of(spec: DecoderSpec) -> Sequence[tuple[int, int]]:
    """List (num_kv_heads, head_dim) of each layer that has a KV cache of its own."""
    return [(mixer.num_kv_heads, mixer.head_dim) for mixer in spec.cache_layers.values()]


def state_views(spec: DecoderSpec, states: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """View state slots (num_slots, state_bytes) uint8 as the tensors of each recurrent layer."""
    import torch

    views = []
    for index, offsets in spec.state_offsets.items():
        mixer = spec.recurrent_layers[index]
        views.append(
            tuple(
                states[:, offset : offset + 4 * prod(shape)].view(torch.float32).unflatten(1, shape)
                for offset, shape in zip(offsets, mixer.state, strict=True)
            )
        )
    return tuple(views)
