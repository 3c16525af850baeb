"""Streams experts from host memory to a device, in pieces through two buffers.

While the device works on one piece, or on the layers between, the next one crosses the bus. Pieces
of all layers follow one another in a circle, so a layer finds its first pieces waiting.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

from appliance.kernels.activation import Activation
from appliance.kernels.cpu.arena import ALIGNMENT
from appliance.kernels.cpu.weight_bytes import memory_of
from appliance.kernels.library_tiles.tiles import LinearTiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.structs import LinearStruct
    from appliance.kernels.operations import Backend
    from appliance.model.spec import ExpertsSpec

logger = logging.getLogger(__name__)


class _Range(NamedTuple):
    """Bytes of host memory, and their place in a piece."""

    address: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Experts that cross the bus together.

    Attributes:
        experts: each one's gate, up and down; without a gate, up and down.
    """

    experts: tuple[tuple[LinearStruct, ...], ...]
    ranges: tuple[_Range, ...]

    @classmethod
    def of(cls, experts: Sequence[tuple[LinearStruct, ...]]) -> _Piece:
        parts = {
            part for expert in experts for struct in expert for part in memory_of(struct).values()
        }
        joined: list[list[int]] = []  # first address, end
        for address, nbytes in sorted(parts):
            if joined and 0 <= address - joined[-1][1] < ALIGNMENT:
                joined[-1][1] = address + nbytes
            else:
                joined.append([address, address + nbytes])
        ranges, offset = [], 0
        for first, end in joined:
            ranges.append(_Range(first, end - first, offset))
            offset += -(-(end - first) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(experts), tuple(ranges))

    @property
    def nbytes(self) -> int:
        return self.ranges[-1].offset + self.ranges[-1].nbytes

    def tiles(self, struct: LinearStruct, content: Tensor) -> LinearTiles:
        """View a weight in a copy of the piece."""
        parts = {}
        for name, (address, nbytes) in memory_of(struct).items():
            start = next(
                one.offset + address - one.address
                for one in self.ranges
                if one.address <= address < one.address + one.nbytes
            )
            parts[name] = content[start : start + nbytes]
        return LinearTiles.of(struct, parts)


@dataclass(slots=True)
class _Buffer:
    """Memory on the device, and what it holds.

    Attributes:
        piece: number of the piece; -1 for none.
        arrived: recorded behind the copy.
        used: recorded behind the work on the piece.
    """

    memory: Tensor
    piece: int = -1
    arrived: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class ExpertStream:
    """Two buffers on a device, and the pieces of host memory that pass through them.

    Args:
        arena: host memory of the experts.
        rows: of a step, from which on its experts are streamed.
        piece_bytes: of a buffer; it grows for an expert that is larger.
    """

    def __init__(
        self,
        arena: Arena,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        *,
        rows: int,
        piece_bytes: int,
    ) -> None:
        self.rows = rows
        self.backend = backend
        self.dtype = dtype
        self._arena = arena
        self._device = device
        self._piece_bytes = piece_bytes
        self._pieces: list[_Piece] = []
        self._buffers: list[_Buffer] = []
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(
        self, experts: Sequence[tuple[LinearStruct, ...]], spec: ExpertsSpec
    ) -> StreamedExperts:
        """Add the experts of the next layer."""
        first = len(self._pieces)
        taken: list[tuple[LinearStruct, ...]] = []
        for expert in experts:
            if taken and _Piece.of([*taken, expert]).nbytes > self._piece_bytes:
                self._pieces.append(_Piece.of(taken))
                taken = []
            taken.append(expert)
        self._pieces.append(_Piece.of(taken))
        return StreamedExperts(self, range(first, len(self._pieces)), spec)

    def allocate(self) -> None:
        """Allocate the buffers, once the last layer is added."""
        if not self._pieces:
            return
        nbytes = max(self._piece_bytes, *(piece.nbytes for piece in self._pieces))
        with torch.inference_mode(mode=False):
            self._buffers = [
                _Buffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
                for _ in range(2)
            ]
        if self._copies is not None:
            _pin(self._arena)

    def experts(self, numbers: range) -> Iterator[tuple[LinearTiles, ...]]:
        """Yield the experts of pieces on the device; work on one is enqueued before the next."""
        if not self._buffers:
            self.allocate()
        for number in numbers:
            self._fetch(number)
            self._fetch(number + 1)
            buffer = self._holder(number)
            assert buffer is not None
            if buffer.arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(buffer.arrived)
            piece = self._pieces[number]
            for expert in piece.experts:
                yield tuple(piece.tiles(struct, buffer.memory) for struct in expert)
            buffer.used = self._recorded()
            if len(self._pieces) > len(self._buffers):
                self._fetch(number + 2, into=buffer)

    def _fetch(self, number: int, into: _Buffer | None = None) -> None:
        """Enqueue the copy of a piece, unless a buffer holds it."""
        number %= len(self._pieces)
        if self._holder(number) is not None:
            return
        kept = {(number - 1) % len(self._pieces)}  # it is in use now
        buffer = into or next(one for one in self._buffers if one.piece not in kept)
        buffer.piece = number
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if self._copies is not None and buffer.used is not None:
                self._copies.wait_event(buffer.used)
            for one in self._pieces[number].ranges:
                place = buffer.memory[one.offset : one.offset + one.nbytes]
                place.copy_(host_bytes(one), non_blocking=True)
            buffer.arrived = self._recorded()

    def _holder(self, number: int) -> _Buffer | None:
        return next((one for one in self._buffers if one.piece == number), None)

    def _recorded(self) -> torch.cuda.Event | None:
        if self._copies is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class StreamedExperts:
    """The experts of one layer, multiplied on the device piece by piece; like `RoutedMLPs`."""

    stream: ExpertStream
    pieces: range
    spec: ExpertsSpec

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum each token's weighted experts; waits once, to learn how many rows each one has.

        Args:
            hidden: (num_tokens, hidden_size).
            ids: (num_tokens, top_k) int64.
            weights: (num_tokens, top_k) float32.

        Returns:
            (num_tokens, hidden_size) float32.
        """
        out = torch.zeros_like(hidden, dtype=torch.float32)
        chosen, shares, top_k = ids.flatten(), weights.flatten(), ids.shape[1]
        pairs = chosen.argsort(stable=True)  # by expert
        counts = torch.bincount(chosen, minlength=self.spec.router.num_experts).tolist()
        start = 0
        for count, expert in zip(counts, self.stream.experts(self.pieces), strict=True):
            own = pairs[start : start + count]
            start += count
            if count:
                tokens = own // top_k
                read, share = hidden[tokens], shares[own, None]
                if self.spec.weighs_inputs:
                    said = self._run(expert, read * share.to(read.dtype)).float()
                else:
                    said = self._run(expert, read).float() * share
                out.index_add_(0, tokens, said)
        return out

    def _run(self, expert: tuple[LinearTiles, ...], x: Tensor) -> Tensor:
        *inner, down = expert
        middle = torch.cat([self._multiply(tiles, x) for tiles in inner], dim=1)
        activation = self.spec.activation
        if self.spec.gated:
            middle = self.stream.backend.gated_activation(middle, activation)
        else:
            assert isinstance(activation, Activation), "a clamp has a gate"
            middle = self.stream.backend.activated(middle, activation)
        return self._multiply(down, middle)

    def _multiply(self, tiles: LinearTiles, x: Tensor) -> Tensor:
        weight = self.stream.backend.widen_tiles(tiles, self.stream.dtype)
        bias = None if tiles.bias is None else tiles.bias.to(x.dtype)
        return linear(x, weight, bias)


def host_bytes(one: _Range) -> Tensor:
    """Return host memory as (nbytes,) uint8, without a copy."""
    memory = (ctypes.c_uint8 * one.nbytes).from_address(one.address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(arena: Arena) -> None:
    """Keep host memory in place, so that the device reads it while the host goes on."""
    runtime: Any = torch.cuda.cudart()
    for address, nbytes in arena.mapped():
        status = int(runtime.cudaHostRegister(address, nbytes, 0))
        if status:
            logger.warning(
                "experts cross the bus slowly: the driver does not pin %d MiB of host memory"
                " (error %d); raise the limit of locked memory (ulimit -l)",
                nbytes >> 20,
                status,
            )
            return
