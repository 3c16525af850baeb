"""What executes a `DecoderSpec`: the torch decoder and the CPU library, by the same protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.kv_cache import KVFormat, LayerPrecision
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.spec import DecoderSpec


class Cache(Protocol):
    """All physical blocks of all layers; only its executor knows what lies in them."""

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        ...

    @property
    def open_bytes(self) -> int:
        """Bytes of one open page of all layers; 0 if none is sealed."""
        ...

    def read_block(self, block: int, open_page: int = -1) -> bytes:
        """The bytes of a block, and of an open page if one is named; for host memory only."""
        ...

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_page: int = -1
    ) -> None:
        """Put back what `read_block` returned."""
        ...

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks, for copy-on-write."""
        ...

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open pages; where no layer is sealed there are none."""
        ...


AnyCache = TypeVar("AnyCache", bound=Cache)


class Executor(Protocol[AnyCache]):
    """A loaded model; it holds no cache.

    Attributes:
        spec: what it computes.
        dtype: of activations, and of weights that are not packed.
        device: where tensors of a step go.
        weight_bytes: bytes that the weights take as they are laid out.
        weight_format: in words, such as "4 bits (groups of 32), head 8 bits".
    """

    @property
    def spec(self) -> DecoderSpec: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def weight_bytes(self) -> int: ...  # noqa: D102
    @property
    def weight_format(self) -> str: ...  # noqa: D102

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
    ) -> AnyCache:
        """Fresh blocks for every layer, and open pages for those that are sealed."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: AnyCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step and leave its keys and values in the cache.

        Args:
            token_ids: (num_tokens,) int64, all sequences' rows one after another.
            positions: (num_tokens,) int64, each row's place in its sequence.
            batch: which rows belong to which sequence, and their blocks.
            cache: the blocks.
            rows: (num_rows,) int64, the rows whose logits are wanted, perhaps none; None means
                all of them.

        Returns:
            Logits, (num_rows, vocab_size) float32.
        """
        ...


def heads_of(spec: DecoderSpec) -> Sequence[tuple[int, int]]:
    """KV heads of each layer, and their width."""
    return [(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers]
