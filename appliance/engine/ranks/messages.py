"""Rank 0's messages to the other ranks, except steps, and their answers. Carries no code."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from appliance.config import EngineConfig
from appliance.engine.ranks.link import LinkPath, LinkTrial

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Room(msgspec.Struct, frozen=True):
    """Sizes of the memory that ranks share for steps; only written pages take memory.

    Attributes:
        floats: numbers that a rank sends in one exchange.
        payload_bytes: for the description of a step.
        answer_bytes: for the last stage's results; 0 without stages.
    """

    floats: int
    payload_bytes: int
    answer_bytes: int = 0


class OpenLink(msgspec.Struct, frozen=True, tag=True):
    """Map a part of the exchange's memory, and join one other rank there."""

    offset: int
    num_bytes: int
    floats: int


class SendBack(msgspec.Struct, frozen=True, tag=True):
    """Send received numbers back over the link: how many, and how often."""

    count: int
    rounds: int


class OpenDevice(msgspec.Struct, frozen=True, tag=True):
    """Load torch, and open a device by its name."""

    device: str


class TryLinks(msgspec.Struct, frozen=True, tag=True):
    """Take part in the test of the links between ranks of torch, on the opened device.

    Attributes:
        rank: rank 0 answers with its results.
        size: number of ranks.
        path: of the links.
        limit: seconds per link.
    """

    rank: int
    size: int
    path: LinkPath
    limit: float


class CopyMemory(msgspec.Struct, frozen=True, tag=True):
    """Measure the copy bandwidth of this many threads."""

    threads: int


class MeasureGPU(msgspec.Struct, frozen=True, tag=True):
    """Measure the opened GPU, of whose memory the model may take this share."""

    utilization: float


class Join(msgspec.Struct, frozen=True, tag=True):
    """Load a part of the model.

    Attributes:
        shares: of all ranks.
        is_exact: as in `Split`.
        dtype: of weights that are not packed, by name.
        bounds: of the stages' layers; empty if each layer is divided.
        device: torch's kind of device; None for the CPU library.
    """

    config: EngineConfig
    shares: tuple[int, ...]
    is_exact: bool
    dtype: str
    rank: int
    threads: int
    bounds: tuple[int, ...]
    room: Room
    context_length: int
    device: str | None = None


class CacheLayer(msgspec.Struct, frozen=True):
    """The precision of one layer's keys and values; see `LayerPrecision`.

    Attributes:
        head_scales: (2, num_kv_heads) of the whole model, or None.
        key_mean: (num_kv_heads, head_dim) of the whole model, or None.
    """

    format: str
    head_scales: tuple[tuple[float, ...], ...] | None
    key_mean: tuple[tuple[float, ...], ...] | None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate or map the cache.

    Attributes:
        layers: in the order of `cache_layers`.
        strides: bytes of a block, an open block and a state with all ranks' parts, in memory
            that all ranks share.
        offsets: of this rank's part in each.
    """

    layers: tuple[CacheLayer, ...]
    num_blocks: int
    block_size: int
    num_open: int
    num_states: int
    strides: tuple[int, int, int] = (0, 0, 0)
    offsets: tuple[int, int, int] = (0, 0, 0)


class MakeSlots(msgspec.Struct, frozen=True, tag=True):
    """Make room for this many adapters, whose ranks torch limits."""

    count: int
    most_ranks: int


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Fill an adapter's slot with safetensors, or empty it."""

    slot: int
    content: bytes | None
    scales: dict[str, float]


class TimeKernels(msgspec.Struct, frozen=True, tag=True):
    """Time the kernels of a rank's part, see `run.kernel_times`; it answers `KernelsTimed`.

    Attributes:
        known: choices by the names of forms, as JSON.
        most_rows: of a step.
        seconds: at most.
        kv_format: of most layers' cache, by name.
    """

    known: bytes
    most_rows: int
    seconds: float
    kv_format: str


class UseTimed(msgspec.Struct, frozen=True, tag=True):
    """Work by timed choices, by the names of forms, as JSON; see `TimeKernels`."""

    choices: bytes
    kv_format: str


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Run a step in torch; its tensors follow in a broadcast between devices.

    Attributes:
        counts: elements of each tensor, in the order of `step_tensors`; negative if absent.
        wants_logits: run the head too.

    The other fields are the host's numbers of a `RaggedBatch`.
    """

    counts: tuple[int, ...]
    wants_logits: bool
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    decode_rows: int
    sealed_lens: tuple[int, ...] | None
    open_tables: tuple[tuple[int, ...], ...] | None
    state_slots: tuple[int, ...] | None


class RunHead(msgspec.Struct, frozen=True, tag=True):
    """Run the head on this many rows, which follow in a broadcast."""

    num_rows: int


class CaptureStep(msgspec.Struct, frozen=True, tag=True):
    """Run a step, and capture it as the graph with this number."""

    number: int
    step: RunStep


class ReplayStep(msgspec.Struct, frozen=True, tag=True):
    number: int


class SaveBlock(msgspec.Struct, frozen=True, tag=True):
    """Write a block's part, and an open block's if given, to the rank's window."""

    block: int
    open_block: int


class LoadBlock(msgspec.Struct, frozen=True, tag=True):
    """Fill a block's part, and an open block's if given, from the rank's window."""

    block: int
    open_block: int


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks, or open ones, inside the cache."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    are_open: bool


class CopyStates(msgspec.Struct, frozen=True, tag=True):
    """Copy rows of recurrent state, in this order."""

    pairs: tuple[tuple[int, int], ...]


class SaveState(msgspec.Struct, frozen=True, tag=True):
    """Write a row's part of recurrent state to the rank's window."""

    row: int


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """Fill a row's part of recurrent state from the rank's window."""

    row: int


class LinksTried(msgspec.Struct, frozen=True, tag=True):
    """The tests of rank 0's links to the others, up to the first unsound one."""

    trials: tuple[LinkTrial, ...]


class MemoryCopied(msgspec.Struct, frozen=True, tag=True):
    """A rank's memory.

    Attributes:
        bytes_per_second: read and written.
        budget_bytes: the rank's limit on its GPU; None on the CPU.
    """

    bytes_per_second: float
    budget_bytes: int | None = None


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """A part of the model is loaded."""

    weight_bytes: int
    num_dense: int


class RankAllocated(msgspec.Struct, frozen=True, tag=True):
    """Torch's cache is allocated; bytes of the rank's part of a block and of an open one."""

    block_bytes: int
    open_bytes: int


class RankCaptured(msgspec.Struct, frozen=True, tag=True):
    """A step is captured, or cannot be."""

    why_not: str = ""


class KernelsTimed(msgspec.Struct, frozen=True, tag=True):
    """The kernels of a rank's part are timed; see `PartTimes`."""

    wanted: tuple[tuple[int, str], ...]
    choices: bytes


class RankDone(msgspec.Struct, frozen=True, tag=True):
    """An order is carried out."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """An order cannot be carried out."""

    reason: str
    exit_code: int


ToTorchRank: TypeAlias = (
    Allocate
    | RunStep
    | RunHead
    | CaptureStep
    | ReplayStep
    | SaveBlock
    | LoadBlock
    | CopyBlocks
    | CopyStates
    | SaveState
    | LoadState
    | MakeSlots
    | PutAdapter
    | TimeKernels
    | UseTimed
)
ToNewRank: TypeAlias = OpenLink | SendBack | OpenDevice | TryLinks | CopyMemory | MeasureGPU | Join
ToRank: TypeAlias = ToNewRank | ToTorchRank
FromRank: TypeAlias = (
    LinksTried
    | MemoryCopied
    | RankJoined
    | RankDone
    | RankFailed
    | RankAllocated
    | RankCaptured
    | KernelsTimed
)
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def send(connection: Connection, message: ToRank | FromRank) -> None:
    connection.send_bytes(_encoder.encode(message))


def receive_order(connection: Connection) -> ToRank:
    """Wait for the next order; raises EOFError if rank 0 has ended."""
    return _to_rank.decode(connection.recv_bytes())


def receive_answer(connection: Connection) -> FromRank:
    """Wait for a rank's answer; raises EOFError if it has ended."""
    return _from_rank.decode(connection.recv_bytes())
