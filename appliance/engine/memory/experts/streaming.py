"""Decides how many rows of a step make it faster to stream experts to the device than to stay.

Imports no torch.

The host reads the experts that rows choose once, or is bound by its arithmetic. A stream takes the
longest of three that overlap: all experts' bytes across the bus, the launches, and on the device
the widening of all weights and the products.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Assumed, not measured on a GPU: four fifths of two channels of DDR4-3200 (2 x 8 bytes x
# 3.2 GT/s); four fifths of PCI Express 4.0 x16; the slowest memory in the table of GPUs; a fifth
# of an RTX 3090's float16 products; ten launches an expert.
HOST_GB_PER_SECOND = 40.0
BUS_GB_PER_SECOND = 25.0
DEVICE_GB_PER_SECOND = 272.0
DEVICE_OPERATIONS = 15e12
LAUNCH_SECONDS, LAUNCHES = 5e-6, 10
# Operations of a thread: SmolLM2-135M's 2,086 tokens/s of prefill by two threads, times two
# operations for each of 106 million weights (benchmark cpu_peers).
THREAD_OPERATIONS = 220e9

LEAST_ROWS = 32  # fewer leave most experts with less than a tile of rows
MOST_ROWS = 1 << 20
PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The experts of one layer, and the threads that multiply them in host memory."""

    num_experts: int
    top_k: int
    weights: int  # of one expert
    host_bytes: int  # of all experts
    hidden_size: int
    element_bytes: int
    threads: int

    def host_seconds(self, rows: int) -> float:
        """Return the time in host memory, and of the rows across the bus and back."""
        chosen = 1 - (1 - self.top_k / self.num_experts) ** rows  # by a router without favourites
        read = self.host_bytes * chosen / (HOST_GB_PER_SECOND * 1e9)
        products = self._operations(rows) / (self.threads * THREAD_OPERATIONS)
        crossing = rows * self.hidden_size * (self.element_bytes + 4) / (BUS_GB_PER_SECOND * 1e9)
        return max(read, products) + crossing

    def stream_seconds(self, rows: int) -> float:
        """Return the time with the experts streamed to the device."""
        # Widened weights are written once and read once.
        moved = self.host_bytes + 2 * self.element_bytes * self.num_experts * self.weights
        widened = moved / (DEVICE_GB_PER_SECOND * 1e9)
        return max(
            self.host_bytes / (BUS_GB_PER_SECOND * 1e9),
            self.num_experts * LAUNCHES * LAUNCH_SECONDS,
            widened + self._operations(rows) / DEVICE_OPERATIONS,
        )

    def streamed_from(self) -> int | None:
        """Return the least rows of a step for which a stream is faster; None if none is."""
        rows = range(LEAST_ROWS, MOST_ROWS + 1)
        at = bisect_left(
            rows, True, key=lambda count: self.stream_seconds(count) < self.host_seconds(count)
        )
        return None if at == len(rows) else rows[at]

    def _operations(self, rows: int) -> float:
        return 2.0 * rows * self.top_k * self.weights


@dataclass(frozen=True, slots=True)
class Streaming:
    """The plan for streams through two buffers on the device.

    Attributes:
        rows: of a step, from which on its experts are streamed; None never.
        most_rows: of any step.
        piece_bytes: of one buffer.
        widened_bytes: of a matrix that is being widened.
        seconds: of a layer with this many rows, streamed.
        host_seconds: the same in host memory.
    """

    rows: int | None
    most_rows: int
    piece_bytes: int
    widened_bytes: int
    seconds: float = 0.0
    host_seconds: float = 0.0

    @classmethod
    def of(cls, work: LayerWork, most_rows: int, matrix_weights: int) -> Streaming:
        """Plan for the layer with the largest experts."""
        rows = work.streamed_from()
        asked = most_rows if rows is None else rows
        return cls(
            rows=rows,
            most_rows=most_rows,
            piece_bytes=max(PIECE_BYTES, -(-work.host_bytes // work.num_experts)),
            widened_bytes=(12 + work.element_bytes) * matrix_weights,
            seconds=work.stream_seconds(asked),
            host_seconds=work.host_seconds(asked),
        )

    @property
    def is_used(self) -> bool:
        """True if a step may have as many rows."""
        return self.rows is not None and self.rows <= self.most_rows

    @property
    def device_bytes(self) -> int:
        """Memory on the device for buffers and widened weights."""
        return 2 * self.piece_bytes + self.widened_bytes if self.is_used else 0

    def in_words(self) -> str:
        """Name the threshold and the reason."""
        if self.rows is None:
            return "prompts, too, since no number of rows makes the bus faster than the host"
        times = (
            f"{1e3 * self.seconds:,.1f} ms a layer at {BUS_GB_PER_SECOND:,.0f} GB/s of bus instead"
            f" of {1e3 * self.host_seconds:,.1f} ms (assumed, not measured)"
        )
        if not self.is_used:
            return (
                f"prompts, too: streaming them to the GPU would pay from {self.rows:,} rows of a"
                f" step, {times}, and --max-num-batched-tokens is {self.most_rows:,}"
            )
        return (
            f"steps of {self.rows:,} rows or more stream them to the GPU instead, through two"
            f" buffers of {self.piece_bytes / 2**20:,.0f} MiB: {times}"
        )
