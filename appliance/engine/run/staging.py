"""One buffer for all inputs of a step: filled on the host, copied at once, read in place.

A graph reads its inputs at the addresses of its capture, so a given shape always has the same
layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.penalties.rows import PenaltyRows
from appliance.kernels.rows.host_spans import SpanRows
from appliance.kernels.sampling.rows import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.run.device import Device, Event

Layout = TypeVar("Layout")
ALIGNMENT = 16  # bytes that kernels load at once
COPIES = 2  # host buffers: the device reads one while the host fills the other
MAX_SHAPES = 1024  # layouts to keep: those of decode steps recur

# Parts that are passed on together.
_SAMPLING = [part.name for part in fields(SamplingRows)]
_PENALTIES = [part.name for part in fields(PenaltyRows)]
_SPANS = [part.name for part in fields(SpanRows)]


class StepShape(NamedTuple):
    """Sizes of a step; block tables come last, so that their width moves no other part."""

    num_tokens: int
    num_seqs: int
    num_samples: int
    table_width: int  # in blocks
    is_sealed: bool = False  # with open blocks
    is_recurrent: bool = False  # with state slots
    is_adapted: bool = False  # with adapters
    num_tiles: int = 0  # of prompts, in a padded step
    num_spans: int = 0  # of rows that pass through states, in a padded step
    num_chunks: int = 0  # of these spans
    has_axes: bool = False  # with positions in time, height and width

    def parts(self) -> dict[str, tuple[type[np.generic], int]]:
        """Return element type and count of each part, in order."""
        tokens, seqs, samples = self.num_tokens, self.num_seqs, self.num_samples
        return {
            "token_ids": (np.int64, tokens),  # first: see `sources`
            # Index of each row's token in `Staging.latest`, followed by the token ids.
            "sources": (np.int64, tokens),
            "positions": (np.int64, tokens),
            **({"axes": (np.int64, 3 * tokens)} if self.has_axes else {}),
            "slot_mapping": (np.int64, tokens),
            "query_start": (np.int32, seqs + 1),
            "context_lens": (np.int32, seqs),
            **(self._sealed_parts() if self.is_sealed else {}),
            **({"state_slots": (np.int32, seqs)} if self.is_recurrent else {}),
            **({"adapter_slots": (np.int32, seqs)} if self.is_adapted else {}),
            **({"tiles": (np.int32, 2 * self.num_tiles)} if self.num_tiles else {}),
            **(self._span_parts() if self.num_spans else {}),
            "sample_rows": (np.int64, samples),
            "temperature": (np.float32, samples),
            "top_k": (np.int64, samples),
            "top_p": (np.float32, samples),
            "min_p": (np.float32, samples),
            "uniform": (np.float64, samples),
            "places": (np.int32, samples),
            "counted": (np.int32, samples),
            "repetition": (np.float32, samples),
            "presence": (np.float64, samples),
            "frequency": (np.float64, samples),
            "block_tables": (np.int32, seqs * self.table_width),
        }

    def _sealed_parts(self) -> dict[str, tuple[type[np.generic], int]]:
        return {
            "sealed_lens": (np.int32, self.num_seqs),
            "open_tables": (np.int32, self.num_seqs),
            "open_slots": (np.int64, self.num_tokens),
            "moves": (np.int64, 2 * self.num_seqs),
        }

    def _span_parts(self) -> dict[str, tuple[type[np.generic], int]]:
        found: dict[str, tuple[type[np.generic], int]]
        found = dict.fromkeys(_SPANS, (np.int64, self.num_spans))
        found["span_goes_on"] = (np.bool_, self.num_spans)
        found["chunk_spans"] = (np.int64, self.num_chunks)
        return found

    def places(self) -> Mapping[str, tuple[int, int]]:
        """Return each part's byte range."""
        return _places(self)

    @property
    def num_bytes(self) -> int:
        return self.places()["block_tables"][1]


@lru_cache(maxsize=MAX_SHAPES)
def _places(shape: StepShape) -> Mapping[str, tuple[int, int]]:
    places, end = {}, 0
    for name, (dtype, count) in shape.parts().items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + np.dtype(dtype).itemsize * count
        places[name] = (begin, end)
    return places


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's parts on the device."""

    token_ids: Tensor
    sources: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    sample_rows: Tensor
    sampling: SamplingRows
    penalties: PenaltyRows
    block_tables: Tensor  # (num_seqs, table_width)
    # With open blocks, see `SealedSpans`; a sequence that fills no block has a move of -1.
    sealed_lens: Tensor | None = None
    open_tables: Tensor | None = None  # (num_seqs,)
    open_slots: Tensor | None = None
    moves: Tensor | None = None  # (2 * num_seqs,)
    state_slots: Tensor | None = None  # (num_seqs,), with recurrent layers
    adapter_slots: Tensor | None = None  # (num_seqs,), with adapters
    tiles: Tensor | None = None  # (2 * num_tiles,), see `RaggedBatch.prefill_tiles`
    spans: SpanRows | None = None
    axes: Tensor | None = None  # (3 * num_tokens,), see `RaggedBatch.axes`


@dataclass(slots=True)
class _HostBuffer:
    tensor: Tensor
    copied: Event | None = None
    arrays: dict[StepShape, dict[str, NDArray[Any]]] = field(default_factory=dict)


class Staging:
    """Buffers for steps up to a size.

    Attributes:
        latest: (num_samples,) int64 on the device: the previous step's tokens, negative codes as 0.
            Precedes the step's token ids, so that one gather finds a row's token, known to the host
            or not.
    """

    def __init__(self, device: Device, largest: StepShape) -> None:
        self._device = device
        latest_bytes = -(-largest.num_samples * 8 // ALIGNMENT) * ALIGNMENT
        self.num_bytes = latest_bytes + largest.num_bytes
        self.memory = device.zeros((self.num_bytes,), "uint8")
        self.latest: Tensor = arrays.viewed(self.memory[:latest_bytes], "int64")
        self._inputs = self.memory[latest_bytes:]
        # A synchronous device reads the host's arrays in place.
        self._hosts = [_HostBuffer(self._inputs)]
        if device.is_asynchronous:
            self._hosts = [_HostBuffer(device.pinned(largest.num_bytes)) for _ in range(COPIES)]
        self._tensors: dict[StepShape, StepTensors] = {}

    @property
    def first_source(self) -> int | None:
        """Source of a step's first token id; None on a synchronous device."""
        return len(self.latest) if self._device.is_asynchronous else None

    def arrays(self, shape: StepShape) -> dict[str, NDArray[Any]]:
        """Return a step's host arrays, to fill before `send`; their content is undefined."""
        self._hosts.append(self._hosts.pop(0))
        host = self._hosts[0]
        if host.copied is not None:
            host.copied.wait()
        found = host.arrays.get(shape)
        if found is None:
            memory, parts = host.tensor.numpy(), shape.parts()
            found = {
                name: memory[begin:end].view(parts[name][0])
                for name, (begin, end) in shape.places().items()
            }
            self._keep(host.arrays, shape, found)
        return found

    def send(self, shape: StepShape) -> StepTensors:
        """Enqueue the copy of the arrays filled last; return the device's tensors."""
        if self._device.is_asynchronous:
            host, size = self._hosts[0], shape.num_bytes
            self._inputs[:size].copy_(host.tensor[:size], non_blocking=True)
            host.copied = self._device.record()
        return self.tensors(shape)

    def tensors(self, shape: StepShape) -> StepTensors:
        found = self._tensors.get(shape)
        if found is None:
            parts = shape.parts()
            views = {
                name: arrays.viewed(self._inputs[begin:end], parts[name][0])
                for name, (begin, end) in shape.places().items()
            }
            tables = views.pop("block_tables").view(shape.num_seqs, shape.table_width)
            spans = {name: views.pop(name) for name in _SPANS if name in views}
            found = StepTensors(
                sampling=SamplingRows(**{name: views.pop(name) for name in _SAMPLING}),
                penalties=PenaltyRows(**{name: views.pop(name) for name in _PENALTIES}),
                block_tables=tables,
                spans=SpanRows(**spans) if spans else None,
                **views,
            )
            self._keep(self._tensors, shape, found)
        return found

    def token_ids(self, shape: StepShape) -> Tensor:
        """Return (num_tokens,) int64 on the device: known to the host, or just sampled."""
        tensors = self.tensors(shape)
        if not self._device.is_asynchronous:
            return tensors.token_ids
        _, end = shape.places()["token_ids"]
        tokens: Tensor = arrays.viewed(self.memory[: len(self.latest) * 8 + end], "int64")
        return tokens.index_select(0, tensors.sources)

    def _keep(self, known: dict[StepShape, Layout], shape: StepShape, layout: Layout) -> None:
        # Cached layouts lie between the steps' logits in host memory; on the CPU many would
        # fragment it.
        if len(known) == (MAX_SHAPES if self._device.is_asynchronous else 1):
            known.clear()
        known[shape] = layout
