"""The executor on the CPU library: a whole ragged step in one call, and the models it covers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from appliance.kernels import arrays
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.cpu.cache import NativeCache
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.step_structs import BatchStruct
from appliance.model.executor import heads_of
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec
from appliance.model.shard.stage import Stage
from appliance.model.shard.weights import own_precisions, own_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.cache import CachePlaces
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.structs import ModelStruct
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.native_slots import NativeAdapterSlots
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.shard.shard import Part
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec, MixerSpec

HEAD_WIDTH_STEP = 16  # the library's vectors
MOST_HEAD_WIDTH = 512
MOST_LATENT = 1024
MOST_STATE_ROWS = 256  # keys of a recurrent head whose state is kept in 16 bits


@dataclass(frozen=True, slots=True)
class NativeDecoder:
    """A model in the library's layout, with float32 activations.

    Attributes:
        dtype: of unpacked weights.
        model: points into `arena`.
        part: a rank's part of the model; None: all of it.
        num_dense: weights that became dense when the part was cut out.
    """

    spec: DecoderSpec
    dtype: Any
    engine: NativeEngine
    model: ModelStruct
    arena: Arena
    weight_format: str
    part: Part | None = None
    num_dense: int = 0

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def is_enqueued(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return self.arena.nbytes

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
        places: CachePlaces | None = None,
    ) -> NativeCache:
        return NativeCache(
            self.engine.library,
            self.own_precisions(format),
            heads_of(self.spec),
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
            state_bytes=self.spec.state_bytes,
            state_format=self.spec.state_format,
            places=places,
        )

    def own_precisions(
        self, format: KVFormat | Sequence[LayerPrecision]
    ) -> KVFormat | Sequence[LayerPrecision]:
        """Return the precisions of this rank's layers, with the constants of its heads only."""
        if isinstance(format, KVFormat) or self.part is None:
            return format
        return own_precisions(format, self.part)

    def adapter_slots(
        self, targets: Mapping[str, AdapterTarget], count: int, most_ranks: int | None = None
    ) -> NativeAdapterSlots:
        """Allocate slots for adapters of any rank; see `Executor.adapter_slots`."""
        from appliance.model.adapters.native_slots import NativeAdapterSlots

        part = Stage.whole_of(self.spec) if self.part is None else self.part
        targets = own_targets(targets, part)
        return NativeAdapterSlots(
            self.engine.library, self.model, targets, part.layers, self.dtype, count
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
            MemoryError: the step needs more workspace than is free.
        """
        logits = self._rows(token_ids, rows, self.spec.vocab_size)
        self.step_into(token_ids, positions, batch, cache, rows, logits=logits)
        return logits

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step up to the head; see `Executor.hidden`.

        Raises:
            MemoryError: the step needs more workspace than is free.
        """
        hidden = self._rows(token_ids, rows, self.spec.hidden_size)
        self.step_into(token_ids, positions, batch, cache, rows, hidden=hidden)
        return hidden

    def draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        given: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run one step of a draft head up to the output matrix.

        Args:
            given: (num_tokens, hidden_size) float32, hidden states before each row's token.

        Returns:
            The stream of these rows, and the hidden states after the last norm, both (num_rows,
            hidden_size) float32.

        Raises:
            MemoryError: the step needs more workspace than is free.
        """
        stream = self._rows(token_ids, rows, self.spec.hidden_size)
        hidden = self._rows(token_ids, rows, self.spec.hidden_size)
        self.step_into(
            token_ids,
            positions,
            batch,
            cache,
            rows,
            hidden=hidden,
            given=given,
            streams=stream,
        )
        return stream, hidden

    def recorded(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Run one step up to the head, and record the stream before these layers.

        Returns:
            Hidden states of these rows, (num_rows, hidden_size), and the streams of all rows side
            by side, (num_tokens, len(layers) * hidden_size), both float32.

        Raises:
            MemoryError: the step needs more workspace than is free.
        """
        width = self.spec.hidden_size
        hidden = self._rows(token_ids, rows, width)
        streams = self._rows(token_ids, None, len(layers) * width)
        self.step_into(
            token_ids,
            positions,
            batch,
            cache,
            rows,
            hidden=hidden,
            layers=layers,
            recorded=streams,
        )
        return hidden, streams

    def logits(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:
        """Run the head, into `logits` if given; see `Executor.logits`.

        Raises:
            MemoryError: this many rows need more workspace than is free.
        """
        if logits is None:
            logits = arrays.empty((len(hidden), self.spec.vocab_size), "float32", hidden)
        check(
            self.engine.library.ap_head(
                self.engine.handle,
                ctypes.byref(self.model),
                hidden.data_ptr(),
                len(hidden),
                logits.data_ptr(),
            )
        )
        return logits

    @staticmethod
    def _rows(token_ids: Tensor, rows: Tensor | None, width: int) -> Tensor:
        num_rows = len(token_ids) if rows is None else len(rows)
        return arrays.empty((num_rows, width), "float32", token_ids)  # type: ignore[no-any-return]

    def step_into(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None,
        *,
        hidden: Tensor | None = None,
        logits: Tensor | None = None,
        given: Tensor | None = None,
        streams: Tensor | None = None,
        layers: tuple[int, ...] = (),
        recorded: Tensor | None = None,
        runs: bool = True,
    ) -> None:
        """Run one step, whose results go where the arguments say; see `ap_batch` and `ap_step`.

        Args:
            runs: False only takes the workspace, so that the step will not lack any.

        Raises:
            MemoryError: the step needs more workspace than there is.
        """
        numbers = (ctypes.c_int32 * len(layers))(*layers) if layers else None
        struct = batch_struct(token_ids, positions, batch, rows)
        struct.given = None if given is None else given.data_ptr()
        struct.streams = None if streams is None else streams.data_ptr()
        struct.recorded_layers = None if numbers is None else ctypes.addressof(numbers)
        struct.recorded = None if recorded is None else recorded.data_ptr()
        struct.num_recorded = len(layers)
        if batch.adapters is not None:
            slots = cast("NativeAdapterSlots", batch.adapters.table)
            table = slots.table
            struct.adapter_slots = batch.adapters.slots.data_ptr()
            struct.adapters, struct.num_adapters = ctypes.addressof(table), len(table)
        library, engine = self.engine.library, self.engine.handle
        step = (ctypes.byref(self.model), ctypes.byref(cache.struct), ctypes.byref(struct))
        if not runs:
            check(library.ap_make_room(engine, *step))
            return
        check(
            library.ap_step(
                engine,
                *step,
                None if hidden is None else hidden.data_ptr(),
                None if logits is None else logits.data_ptr(),
            )
        )


def batch_struct(
    token_ids: Tensor, positions: Tensor, batch: RaggedBatch, rows: Tensor | None
) -> BatchStruct:
    """Describe a step's rows, without adapters; the arguments must outlive the result."""
    given = batch.given
    return BatchStruct(
        num_tokens=len(token_ids),
        num_seqs=batch.num_seqs,
        table_width=batch.block_tables.shape[1],
        num_rows=len(token_ids) if rows is None else len(rows),
        token_ids=token_ids.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        query_start=batch.query_start.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        # An empty tensor has a null address, which would mean all rows.
        rows=None if rows is None else rows.data_ptr() or token_ids.data_ptr(),
        open_blocks=None if batch.sealed is None else batch.sealed.open_tables.data_ptr(),
        state_slots=None if batch.state_slots is None else batch.state_slots.data_ptr(),
        sources=None if given is None else given.sources.data_ptr(),
        embeddings=None if given is None else given.embeddings.data_ptr(),
        num_embeddings=0 if given is None else len(given.embeddings),
        addends=None if given is None or given.addends is None else given.addends.data_ptr(),
        num_addends=0 if given is None else given.num_addends,
        axes=None if batch.axes is None else batch.axes.data_ptr(),
        sees=None if batch.sees is None else batch.sees.data_ptr(),
    )


def why_unsupported(source: ModelSource) -> str | None:
    """Say why the CPU library does not support a model; None if it does."""
    for index, attention in source.spec.attention_layers.items():
        width = attention.head_dim
        if width % HEAD_WIDTH_STEP or width > MOST_HEAD_WIDTH:
            return (
                f"layer {index} has heads of {width} elements; the CPU library covers multiples "
                f"of {HEAD_WIDTH_STEP} up to {MOST_HEAD_WIDTH}"
            )
    for index, latent in source.spec.latent_layers.items():
        if latent.head_dim % HEAD_WIDTH_STEP or latent.width > MOST_LATENT:
            return (
                f"layer {index} has latents of {latent.width} elements; the CPU library covers "
                f"multiples of {2 * HEAD_WIDTH_STEP} up to {MOST_LATENT}"
            )
    for index, layer in enumerate(source.spec.layers):
        for width in _recurrent_widths(layer.mixer):
            if width % HEAD_WIDTH_STEP:
                return (
                    f"layer {index} has recurrent heads of {width} elements; the CPU library "
                    f"covers multiples of {HEAD_WIDTH_STEP}"
                )
            if width > MOST_STATE_ROWS and source.spec.state_format is not StateFormat.FP32:
                return (
                    f"layer {index} has recurrent heads of {width} elements; the CPU library keeps"
                    f" states in 16 bits up to {MOST_STATE_ROWS}; use --mamba-cache-dtype fp32"
                )
    return None


def _recurrent_widths(mixer: MixerSpec | None) -> tuple[int, ...]:
    """Return the widths of a recurrent head that the library processes by vectors."""
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.key_dim, mixer.value_dim
    return (mixer.state_dim, mixer.head_dim) if isinstance(mixer, Mamba2Spec) else ()
