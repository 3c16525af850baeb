"""Events of `GET /admin/v1/events`: the server encodes these structs, the dashboard decodes them.

The feed is a stream of server-sent events. Each frame is `event: NAME`, then `data: JSON`: a key of
`EVENTS` and its struct.

    info        at the start, and again when the engine is back or its state changes
    snapshot    every block at once; replaces the map
    delta       blocks that changed since the epoch's last snapshot or delta
    stats       once a second
    sequences   all live sequences after a change, at most five times a second
    log         warnings and errors: the latest at the start, then each as it comes
    job         progress of a long task, such as a quantize run, and its end

Lines that start with a colon are keep-alive comments. Ignore a delta if its epoch is not the last
snapshot's. A leaf: imports neither torch nor numpy.
"""

from __future__ import annotations

import base64
import zlib
from enum import IntEnum

import msgspec

from appliance.stats import EngineStats, RankInfo, SequenceView, StepView
from appliance.stats import LogLine as LogLine

PROTOCOL = 5  # grows with the feed's features; readers ignore unknown ones
NO_OWNER = 0xFFFF
MAX_SHOWN_AGE = 0xFFFF  # seconds


class BlockState(IntEnum):
    """State of a block; a shared one is ACTIVE with more than one reference."""

    FREE = 0  # no content
    CACHED = 1  # no sequence refers to it; its content is kept for reuse
    ACTIVE = 2  # at least one sequence refers to it
    WRITING = 3  # active: the open last block of a sequence, which receives tokens
    LOADING = 4  # active: its content is arriving from host memory or disk


class QualityFact(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the quality card."""

    name: str  # such as kld_mean, see `appliance.commands.quality`
    value: float
    note: str = ""  # the reference it is compared with


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the server."""

    name: str  # id in the API
    state: str  # as `Info.state`


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engine processes that each serve the whole model."""

    state: str  # as `Info.state`
    restarts: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    kv_usage: float = 0.0  # share of its blocks that sequences hold
    prefix_hit_rate: float = 0.0  # of the prompt tokens routed to it


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state, and facts that hold until it restarts."""

    protocol: int = 1  # `PROTOCOL` of the server
    version: str  # of the appliance
    model: str  # id in the API
    state: str  # loading, ready, restarting, asleep, waking, failed
    reason: str = ""  # why it failed
    restarts: int = 0  # engine restarts since the server started
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
    process_bytes: int = 0  # the rest of the engine's memory, if everything is in host memory
    memory_bytes: int = 0
    load_seconds: float = 0.0
    precisions: tuple[str, ...] = ()  # indexed by a cell's precision
    notes: tuple[str, ...] = ()  # fallbacks taken
    quality: tuple[QualityFact, ...] = ()  # from the quality card beside the weights
    chats: bool = True  # the model has a chat template; otherwise it only continues text
    reads_pictures: bool = False  # in messages
    sampling: dict[str, float] = {}  # default sampling
    prompts_shown: bool = False  # the server was started to show prompts
    ranks: tuple[RankInfo, ...] = ()  # processes that each have a part of the model
    models: tuple[ModelView, ...] = ()  # all models of the server, if it has several
    replica: int = 0  # the replica that this describes, see `Stats`


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole block map."""

    epoch: int
    num_blocks: int
    block_size: int
    # Base64 of zlib of num_blocks little-endian 32-bit words. Bits 0-3 hold the `BlockState`, 4-7
    # the precision (an index into `Info.precisions`), 8-15 the reference count (saturates at 255),
    # 16-31 the owner's slot (`SequenceView.slot`) or `NO_OWNER`.
    cells: str
    # Likewise num_blocks little-endian 16-bit words: seconds since the block changed hands, at most
    # `MAX_SHOWN_AGE`. Empty if unknown.
    ages: str = ""

    @classmethod
    def of(cls, epoch: int, block_size: int, words: bytes, ages: bytes = b"") -> Snapshot:
        """Pack little-endian 32-bit words and, if present, little-endian 16-bit ages."""
        return cls(
            epoch=epoch,
            num_blocks=len(words) // 4,
            block_size=block_size,
            cells=_deflate(words),
            ages=_deflate(ages) if ages else "",
        )

    def words(self) -> bytes:
        """Return the cells as `num_blocks` little-endian 32-bit words, or raise ValueError."""
        return _inflate(self.cells, self.num_blocks * 4, "cells")

    def age_words(self) -> bytes:
        """Return the ages as `num_blocks` little-endian 16-bit words, or b"" if unknown."""
        return _inflate(self.ages, self.num_blocks * 2, "ages") if self.ages else b""


def _deflate(words: bytes) -> str:
    return base64.b64encode(zlib.compress(words, level=1)).decode("ascii")


def _inflate(packed: str, size: int, what: str) -> bytes:
    try:
        words = zlib.decompressobj().decompress(base64.b64decode(packed), size + 1)
    except zlib.error as error:
        raise ValueError(f"the {what} of the snapshot do not decompress: {error}") from error
    if len(words) != size:
        raise ValueError(f"the snapshot has {len(words)} bytes of {what}, expected {size}")
    return words


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """`length` blocks from `start` on that became `cell`; in JSON [start, length, cell]."""

    start: int
    length: int
    cell: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that changed."""

    epoch: int
    runs: tuple[BlockRun, ...]


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of a latency over the last minute, in seconds; zeros without measurements."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    count: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of one GPU; None where its driver reports nothing."""

    name: str
    utilization: float | None = None  # 0 to 1
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    throttled: tuple[str, ...] = ()  # reasons for lower clocks
    energy_joules: float | None = None  # since the driver was loaded
    joules_per_token: float | None = None  # over the last minute


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the server and its machine."""

    cpu_cores: int = 0
    cpu_used: float = 0.0  # cores that the server's processes kept busy, 0 to `cpu_cores`
    engine_cpu_seconds: float = 0.0  # since its process began, as the next
    api_cpu_seconds: float = 0.0
    engine_rss_bytes: int = 0
    api_rss_bytes: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()


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
    end_to_end: Quantiles = Quantiles()  # of finished requests
    queue_wait: Quantiles = Quantiles()
    machine: Machine | None = None
    steps: tuple[StepView, ...] = ()  # since the previous stats event, at most the latest
    replicas: tuple[ReplicaView, ...] = ()  # if several; all other numbers are sums


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """Every running or waiting sequence."""

    sequences: tuple[SequenceView, ...]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Lines not sent before on this connection, oldest first."""

    lines: tuple[LogLine, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A long task on the server's machine."""

    name: str  # such as "quantize SmolLM2-135M"
    stage: str
    done: int  # of `total`, in the stage's unit
    total: int  # 0 means unknown
    seconds_left: float | None = None  # of the stage
    part: str = ""  # the latest finished part, such as "layer 3"
    parts_done: int = 0  # of `parts_total`
    parts_total: int = 0  # 0 where there are none
    loss: float | None = None  # of that part, as a share of its outputs' energy
    ended: bool = False  # this is the job's last event


class TableEntry(msgspec.Struct, frozen=True, array_like=True):
    """A block of a block table; in JSON [block, hash, references, precision]."""

    block: int  # physical
    hash: str  # hexadecimal hash of all tokens up to its end; empty until it is full
    references: int
    precision: int  # index into `Info.precisions`


class BlockTable(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /admin/v1/sequences/{request_id}/{index}/blocks, in logical order."""

    request_id: str
    index: int
    num_tokens: int  # in the cache
    blocks: tuple[TableEntry, ...]


Event = Info | Snapshot | Delta | Stats | Sequences | Log | Job

EVENTS: dict[str, type[Event]] = {
    "info": Info,
    "snapshot": Snapshot,
    "delta": Delta,
    "stats": Stats,
    "sequences": Sequences,
    "log": Log,
    "job": Job,
}
NAMES: dict[type[Event], str] = {kind: name for name, kind in EVENTS.items()}


def encode_event(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (
        NAMES[type(event)].encode("ascii"),
        msgspec.json.encode(event),
    )


def decode_event(name: str, data: bytes | str) -> Event | None:
    """Decode one frame's event, None for an unknown name; invalid data raises MsgspecError."""
    kind = EVENTS.get(name)
    return None if kind is None else msgspec.json.decode(data, type=kind)
