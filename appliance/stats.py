"""Snapshots of the engine's numbers and sequences, for log, /metrics and dashboard.

A leaf: imports nothing of ours, and neither torch nor numpy.
"""

from __future__ import annotations

import msgspec

COMPILE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # bounds of compile times


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's numbers after a step, in seconds, tokens or blocks.

    Counters (`*_total`) only grow while the engine process lives. All else is instantaneous.
    """

    steps_total: int = 0
    running: int = 0  # sequences with blocks
    waiting: int = 0  # sequences without blocks
    prompt_tokens_total: int = 0  # prompt tokens accepted, cached ones included
    generation_tokens_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits_total: int = 0  # of these, tokens found
    preemptions_total: int = 0
    aborted_total: int = 0
    expired_total: int = 0  # requests past their deadline, queued or running
    nan_logits_total: int = 0  # sequences that ended on non-finite logits
    blocks_total: int = 0
    blocks_active: int = 0  # referenced by at least one sequence
    blocks_cached: int = 0  # unreferenced, content kept for reuse
    blocks_free: int = 0  # unreferenced, no content
    blocks_shared: int = 0  # referenced more than once
    block_size: int = 0
    kv_tokens: int = 0  # slots of active blocks that hold a token
    step_prefill_tokens: int = 0  # rows of the last step that belong to prompts
    step_decode_tokens: int = 0  # rows of the last step that extend an answer
    step_seconds: float = 0.0  # wall clock of the last step
    model_seconds: float = 0.0  # its part in the model and sampler
    swapped_out_total: int = 0  # blocks moved to host memory
    swapped_in_total: int = 0
    swaps_total: int = 0  # preemptions that kept the blocks instead of recomputing them
    prefix_hits_host_total: int = 0  # of the prefix hits, tokens that came from host memory
    prefix_hits_disk_total: int = 0  # and from the disk
    swapped: int = 0  # waiting sequences whose blocks are kept
    kv_host_blocks: int = 0  # in host memory: preempted, read ahead or evicted
    kv_host_swapped: int = 0  # of these, of preempted sequences
    kv_host_capacity: int = 0  # blocks
    kv_disk_writing: bool = False  # false without a disk tier, or while the disk refuses
    kv_disk_blocks: int = 0  # of this model and KV format
    kv_disk_bytes: int = 0  # of all models
    kv_disk_capacity_bytes: int = 0  # 0 without a disk tier
    kv_disk_pending: int = 0  # blocks waiting in the cache to be written
    kv_disk_written_total: int = 0
    kv_disk_read_total: int = 0
    kv_disk_dropped_total: int = 0  # blocks that left the cache before they were written
    kv_disk_corrupt_total: int = 0  # files that were cut, damaged or foreign, and removed
    kv_disk_evicted_total: int = 0  # files removed for the cap
    state_slots: int = 0  # recurrent states, one per running sequence; 0 without
    state_slots_used: int = 0
    state_checkpoints: int = 0  # copies of states at block boundaries
    state_checkpoints_cached: int = 0  # of these, used ones
    state_bytes: int = 0  # of one slot or checkpoint
    state_saves_total: int = 0  # checkpoints saved
    state_restores_total: int = 0  # sequences that began from a checkpoint
    state_rewinds_total: int = 0  # sequences rewound past rejected drafts
    state_evictions_total: int = 0  # checkpoints evicted for others
    grammar_requests_total: int = 0  # requests with a grammar
    grammar_cache_hits_total: int = 0  # of these, with a compiled grammar in the cache
    grammar_compiles: tuple[int, ...] = ()  # the others, in buckets of `COMPILE_SECONDS`
    grammar_compile_seconds_total: float = 0.0
    pictures_encoded_total: int = 0
    picture_hits_total: int = 0  # pictures of requests whose rows were kept
    picture_seconds_total: float = 0.0  # spent encoding
    picture_bytes: int = 0  # of the rows kept
    drafts_total: int = 0  # sequences in a step with drafts; 0 while speculation is off
    draft_tokens_total: int = 0  # proposed
    accepted_tokens_total: int = 0  # of these, accepted
    accepted_tokens_by_place: tuple[int, ...] = ()  # by position in the draft

    @property
    def kv_usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1."""
        return self.blocks_active / self.blocks_total if self.blocks_total else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens looked up that the prefix cache held, 0 to 1."""
        queries = self.prefix_queries_total
        return self.prefix_hits_total / queries if queries else 0.0

    @property
    def picture_seconds(self) -> float:
        """Mean seconds that a picture took to encode; 0 without any."""
        count = self.pictures_encoded_total
        return self.picture_seconds_total / count if count else 0.0

    @property
    def kv_utilization(self) -> float:
        """Share of allocated slots that hold tokens, 0 to 1; 1 without allocated slots."""
        slots = self.blocks_active * self.block_size
        return self.kv_tokens / slots if slots else 1.0


MAX_STEPS_KEPT = 1024  # of an engine, until they are asked for


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """One finished step; in JSON [number, prefill, decode, sequences, seconds]."""

    number: int  # of the engine process, from 1
    prefill_tokens: int  # rows of sequences with several rows and no drafts
    decode_tokens: int  # rows that extend an answer or end a prompt, drafts included
    sequences: int  # in total
    seconds: float


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A warning or an error of the server."""

    time: float  # Unix seconds
    level: str  # WARNING, ERROR or CRITICAL
    source: str  # name of the logger
    message: str


# Values of `SequenceView.status` and their meaning.
SEQUENCE_STATES = {
    "waiting": "holds no blocks, and was not started yet",
    "encoding": "waits for its pictures to be encoded",
    "reading": "waits for its blocks to be read from the disk",
    "running": "holds blocks",
    "to fork": "a beam that waits to fork the blocks of a sibling",
    "swapped": "had to make room; its blocks are kept and come back",
    "preempted": "had to make room; what has left the cache is computed again",
}


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A live sequence in the dashboard."""

    request_id: str
    index: int
    slot: int
    owner: str
    status: str  # one of `SEQUENCE_STATES`
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks: int
    age_seconds: float
    computed_tokens: int = 0  # in the cache; fewer than the prompt's during prefill
    preemptions: int = 0
    kept_tokens: int = 0  # while swapped: tokens in kept blocks, in the cache or host memory
    draft_tokens: int = 0  # drafted for its answer so far
    accepted_tokens: int = 0  # of these, accepted
    host_blocks: int = 0  # its blocks in host memory, preempted or read from disk
    tokens_per_second: float = 0.0  # over the last second or two
    model: str = ""
    picture_rows: int = 0  # of the prompt's tokens, rows of pictures
    adapter: str = ""  # empty for the base model
    prompt: str = ""  # its beginning, only if the server shows prompts
    yours: bool = True  # the watching key may abort it


class RankLink(msgspec.Struct, frozen=True):
    """The tested way from rank 0 to another.

    Attributes:
        path: in words, such as "shared memory".
        seconds: of a message of a few bytes.
        reason: why this path and no other; empty for the one that usually is the fastest.
    """

    path: str
    seconds: float
    bytes_per_second: float
    reason: str = ""

    def __str__(self) -> str:
        reason = f", since {self.reason}" if self.reason else ""
        rate = f"{self.bytes_per_second / 1e9:,.1f} GB/s"
        return f"{self.path} of {1e6 * self.seconds:,.1f} us and {rate}{reason}"


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a part of the model.

    Attributes:
        share: of the model, beside those of the other ranks.
        threads: of a rank on a CPU.
        weight_bytes: held by it.
        layers: its first and one after its last; None if it has a share of each.
        kv_bytes: of its heads in the KV cache, and of its recurrent states.
        bytes_per_second: measured copy bandwidth, read and written; 0 if not measured.
        reason: why ranks have whole layers that could have a share of each; rank 0's only.
        link: to rank 0; None for that itself.
    """

    pid: int
    share: int
    threads: int
    weight_bytes: int
    layers: tuple[int, int] | None = None
    kv_bytes: int = 0
    bytes_per_second: float = 0.0
    reason: str = ""
    link: RankLink | None = None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        part = f"share {self.share}"
        if self.layers is not None:
            part = f"layers {self.layers[0]} to {self.layers[1] - 1}"
        words = f"{part}, {threads}, {self.weight_bytes / 2**20:,.0f} MiB of weights"
        if self.kv_bytes:
            words += f" and {self.kv_bytes / 2**20:,.0f} of KV cache"
        if self.bytes_per_second:
            words += f", copies {self.bytes_per_second / 1e9:,.1f} GB/s"
        words += f", whole layers, since {self.reason}" if self.reason else ""
        return words if self.link is None else f"{words}, {self.link}"
