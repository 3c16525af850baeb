"""What `GET /admin/v1/events` sends: the server encodes these structs, the dashboard decodes them.

The feed is a stream of server-sent events. Each frame is `event: NAME`, then `data: JSON`, where
the name is a key of `EVENTS` and the JSON is that struct:

    info        at the start, and again when the engine is back or its state changes
    snapshot    every block at once; replaces all that was known
    delta       blocks that changed since the last snapshot or delta of the same epoch
    stats       once a second
    sequences   all live sequences, when they change, at most five times a second

Lines that start with a colon are keep-alive comments. A delta whose epoch is not that of the last
snapshot is to be ignored. A leaf: imports neither torch nor numpy.
"""

from __future__ import annotations

import base64
import zlib
from enum import IntEnum

import msgspec

from appliance.stats import EngineStats, SequenceView

NO_OWNER = 0xFFFF
MAX_SHOWN_REFERENCES = 0xFF


class BlockState(IntEnum):
    """What a block holds; shared means active with more than one reference."""

    FREE = 0  # nothing
    CACHED = 1  # content kept for reuse, referenced by no sequence
    ACTIVE = 2  # referenced by at least one sequence


def pack_cell(state: int, precision: int, references: int, owner: int) -> int:
    """One block as the 32-bit word of the feed.

    Bits 0-3 state, 4-7 precision (an index into `Info.precisions`), 8-15 reference count (stays
    at 255), 16-31 slot of the owning sequence (`SequenceView.slot`) or `NO_OWNER`.
    """
    return state | precision << 4 | min(references, MAX_SHOWN_REFERENCES) << 8 | owner << 16


def unpack_cell(cell: int) -> tuple[BlockState, int, int, int]:
    """State, precision index, reference count and owner slot of one word."""
    return BlockState(cell & 0xF), cell >> 4 & 0xF, cell >> 8 & 0xFF, cell >> 16


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that stay until the engine restarts, and how the engine is."""

    version: str  # of the appliance
    model: str  # id under which it is served
    state: str  # loading, ready, restarting, failed
    reason: str = ""  # of a failure, in words
    restarts: int = 0  # of the engine since the server started
    architecture: str = ""
    device: str = ""
    backend: str = ""
    weight_format: str = ""
    kv_format: str = ""
    context_length: int = 0  # tokens
    block_size: int = 0  # token slots
    num_blocks: int = 0
    max_num_seqs: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    memory_bytes: int = 0
    load_seconds: float = 0.0
    precisions: tuple[str, ...] = ()  # names of the cells' precision index
    notes: tuple[str, ...] = ()  # fallbacks taken, in words


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole block map."""

    epoch: int
    num_blocks: int
    block_size: int
    cells: str  # base64 of zlib of num_blocks little-endian 32-bit words, see `pack_cell`

    @classmethod
    def of(cls, epoch: int, block_size: int, words: bytes) -> Snapshot:
        """Pack little-endian 32-bit words."""
        cells = base64.b64encode(zlib.compress(words, level=1)).decode("ascii")
        return cls(epoch=epoch, num_blocks=len(words) // 4, block_size=block_size, cells=cells)

    def words(self) -> bytes:
        """The cells as `num_blocks` little-endian 32-bit words.

        Raises:
            ValueError: they are not what the geometry says.
        """
        size = self.num_blocks * 4
        try:
            words = zlib.decompressobj().decompress(base64.b64decode(self.cells), size + 1)
        except zlib.error as error:
            raise ValueError(f"the cells of the snapshot do not decompress: {error}") from error
        if len(words) != size:
            raise ValueError(f"the snapshot has {len(words)} bytes of cells, expected {size}")
        return words


class Run(msgspec.Struct, frozen=True, array_like=True):
    """`length` blocks from `start` on that all hold `cell` now; in JSON [start, length, cell]."""

    start: int
    length: int
    cell: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that changed."""

    epoch: int
    runs: tuple[Run, ...]


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of one latency over the last minute, in seconds; zeros when nothing was measured."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    count: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the engine and of the API process at one moment."""

    time: float  # Unix seconds
    uptime_seconds: float  # of the API process
    engine: EngineStats
    requests_running: int  # open at the API: in prefill or decode
    requests_waiting: int  # open at the API: not started by the engine
    requests_finished: int  # since the server started, errors and aborts included
    requests_failed: int
    prompt_tokens_per_second: float  # since the previous stats event
    generation_tokens_per_second: float
    time_to_first_token: Quantiles
    inter_token_latency: Quantiles


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """Every sequence that runs or waits."""

    sequences: tuple[SequenceView, ...]


Event = Info | Snapshot | Delta | Stats | Sequences

EVENTS: dict[str, type[Event]] = {
    "info": Info,
    "snapshot": Snapshot,
    "delta": Delta,
    "stats": Stats,
    "sequences": Sequences,
}
NAMES: dict[type[Event], str] = {kind: name for name, kind in EVENTS.items()}


def encode_event(event: Event) -> bytes:
    """One frame of the stream."""
    return b"event: %s\ndata: %s\n\n" % (
        NAMES[type(event)].encode("ascii"),
        msgspec.json.encode(event),
    )


def decode_event(name: str, data: bytes | str) -> Event | None:
    """The event of one frame, or None if this version does not know its name.

    Raises:
        msgspec.MsgspecError: the data is not that event.
    """
    kind = EVENTS.get(name)
    return None if kind is None else msgspec.json.decode(data, type=kind)
