"""Gives transformers' modules the engine's linears, embeddings, cache and attention.

Two forms: the operations of a torch backend (Triton's kernels on a GPU), and the CPU library.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.cache import NativeCache
from appliance.kernels.cpu.parts import LibraryLinear, attend_layer
from appliance.kernels.cpu.structs import AttentionStruct
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.model.attention import write_step
from appliance.model.decoder import allocate_cache
from appliance.model.embedding import Embedding
from appliance.model.executor import heads_of
from appliance.model.native import batch_struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.kernels.weights.weight import Weight
    from appliance.model.spec import AttentionSpec, DecoderSpec


# Rows of a step up to which torch computes with one thread between the library's linears. Each of
# its parallel operations wakes threads, which then spin on the cores that the library's threads
# need: a norm of 8 rows of 768 took 12 microseconds of a processor with one thread, and 770 with
# two on two busy cores.
FEW_ROWS = 64


class Attend(Protocol):
    """Writes one layer's keys and values of a step to the cache and attends."""

    def __call__(
        self,
        layer: int,
        spec: AttentionSpec,
        qkv: Tensor,  # (num_tokens, num_heads + 2 * num_kv_heads, head_dim), rotated
        sinks: Tensor | None,  # (num_heads,)
    ) -> Tensor:  # (num_tokens, num_heads, head_dim)
        """Attend in a layer of the cache."""
        ...


class Operations(Protocol):
    """Linears, embeddings, cache and attention of one device.

    Attributes:
        dtype: of what modules compute in between.
        device: where they compute it.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Lay out a weight (out_features, in_features) and its bias."""
        ...

    def look_up(self, weight: Weight, shared: Linear | None) -> Callable[[Tensor], Tensor]:
        """Prepare an embedding, (count,) ids to rows; `shared` is a linear of the same weight."""
        ...

    def allocate_cache(
        self, spec: DecoderSpec, format: Any, *, num_blocks: int, block_size: int, num_open: int
    ) -> Any:
        """Allocate a cache; see `Executor.allocate_cache`."""
        ...

    def begin(self, token_ids: Tensor, positions: Tensor, batch: RaggedBatch, cache: Any) -> Attend:
        """Begin a step, and return its attention."""
        ...

    def modules_run(self, num_rows: int) -> AbstractContextManager[None]:
        """Enclose what modules compute of so many rows."""
        ...


@dataclass(frozen=True, slots=True)
class TorchOperations:
    """The operations of one of torch's backends."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return self.backend.prepare_linear(weight, bias, self.dtype)

    def look_up(self, weight: Weight, shared: Linear | None) -> Callable[[Tensor], Tensor]:
        if isinstance(shared, DenseLinear) and shared.weight.dtype == self.dtype:
            weight = shared.weight
        return Embedding.of(weight, 1.0, self.dtype)

    def allocate_cache(
        self, spec: DecoderSpec, format: Any, *, num_blocks: int, block_size: int, num_open: int
    ) -> Any:
        return allocate_cache(
            self.backend,
            spec,
            self.device,
            format,
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
        )

    def begin(self, token_ids: Tensor, positions: Tensor, batch: RaggedBatch, cache: Any) -> Attend:
        backend, work = self.backend, self.backend.plan_attention(batch, cache.block_size)
        angles: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(layer: int, spec: AttentionSpec, qkv: Tensor, sinks: Tensor | None) -> Tensor:
            # Heads come rotated, and are turned once more by nothing: the write knows no other.
            shape = (qkv.shape[0], spec.head_dim // 2)
            if spec.head_dim not in angles:
                none = torch.zeros(shape, device=self.device)
                angles[spec.head_dim] = (none + 1.0, none)
            held = cache.layers[layer]
            query = write_step(backend, qkv, *angles[spec.head_dim], held, batch)
            return backend.paged_attention(
                query,
                held,
                work,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=None if sinks is None else sinks.float(),
            )

        return attend

    def modules_run(self, num_rows: int) -> AbstractContextManager[None]:
        return nullcontext()


class LibraryOperations:
    """The CPU library's weights and attention; what lies between them is float32.

    Args:
        engine: threads and workspace.
        dtype: of weights that are not packed.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, engine: NativeEngine, dtype: torch.dtype) -> None:
        self._engine = engine
        self._packer = WeightPacker(engine, Arena(), dtype)
        self._structs: dict[int, AttentionStruct] = {}

    def linear(self, weight: Weight, bias: Tensor | None) -> LibraryLinear:
        return LibraryLinear(self._engine, self._packer.linear(weight, bias), self._packer.arena)

    def look_up(self, weight: Weight, shared: Linear | None) -> Callable[[Tensor], Tensor]:
        tiles = shared if isinstance(shared, LibraryLinear) else self.linear(weight, None)
        return tiles.rows

    def allocate_cache(
        self, spec: DecoderSpec, format: Any, *, num_blocks: int, block_size: int, num_open: int
    ) -> NativeCache:
        return NativeCache(
            self._engine.library,
            format,
            heads_of(spec),
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
        )

    def begin(
        self, token_ids: Tensor, positions: Tensor, batch: RaggedBatch, cache: NativeCache
    ) -> Attend:
        struct = batch_struct(token_ids, positions, batch, None)

        def attend(layer: int, spec: AttentionSpec, qkv: Tensor, sinks: Tensor | None) -> Tensor:
            attention = self._attention(layer, spec)
            held = None if sinks is None else sinks.float().contiguous()
            attention.sinks = None if held is None else held.data_ptr()
            return attend_layer(self._engine, attention, cache, layer, struct, qkv)

        return attend

    @contextmanager
    def modules_run(self, num_rows: int) -> Iterator[None]:
        threads = torch.get_num_threads()
        if num_rows > FEW_ROWS or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _attention(self, layer: int, spec: AttentionSpec) -> AttentionStruct:
        if layer not in self._structs:
            self._structs[layer] = AttentionStruct(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window or 0,
                scale=spec.scale,
                softcap=spec.softcap or 0.0,
            )
        return self._structs[layer]
