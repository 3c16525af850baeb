"""The closed schema between the API process and the engine process.

Every frame on the socket is one of `ToEngine` or `FromEngine`, as MessagePack behind a 4-byte
little-endian length. Nothing here can carry code. Imports no torch.
"""

from __future__ import annotations

import msgspec

from appliance.config import EngineConfig
from appliance.engine.request import FinishReason, Request
from appliance.stats import EngineStats, LogLine, StepView
from appliance.stats import SequenceView as SequenceView


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message: the settings to load."""

    config: EngineConfig
    eos_token_ids: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request in any phase and free its blocks; an unknown id is ignored."""

    request_id: str
    index: int | None = None  # one choice only; None means all of them


class FetchTable(msgspec.Struct, frozen=True, tag=True):
    """Ask for the `Table` of a sequence."""

    request_id: str
    index: int


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The model's tokens, which grammars need; sent before the first request with one."""

    tokens: tuple[bytes, ...]  # by id; empty for an id that stands for no text
    special: tuple[int, ...]  # ids that a text cannot contain


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process after the current step."""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One token and its log probability (natural logarithm)."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token, then the likeliest ones in falling order."""

    chosen: Candidate
    top: tuple[Candidate, ...]


class SequenceDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens, or the end, that one step added to one choice of one request."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR
    refused: bool = False  # the request itself is at fault
    expired: bool = False  # the request waited too long and was never started
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queue_seconds: float | None = None  # on the first delta: time in the engine's queue
    cumulative_logprob: float | None = None  # of an answer of beam search, which is one delta
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the next tokens of the prompt
    pooled: bytes | None = None  # float32, the hidden state that stands for the prompt


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a sequence, in logical order; none if it is not live."""

    request_id: str
    index: int
    num_tokens: int = 0  # in the cache
    blocks: tuple[int, ...] = ()
    hashes: bytes = b""  # of the full blocks, 16 bytes each


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading."""

    stage: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model and its memory layout; bytes unless said otherwise."""

    model: str
    architecture: str
    device: str
    backend: str
    weight_format: str  # e.g. "4 bits (groups of 32), head 8 bits", "bf16"
    kv_format: str
    context_length: int  # tokens, prompt and answer together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    memory_bytes: int  # of the device when memory was planned
    load_seconds: float
    fingerprint: str  # of weights, formats and engine version
    precisions: tuple[str, ...] = ()  # by the index in a block's word; kv_format if empty
    notes: tuple[str, ...] = ()  # fallbacks taken
    kv_host_bytes: int = 0  # host memory for blocks that leave the cache
    process_bytes: int = 0  # of the engine's process besides; 0 if that is other memory


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts requests."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; it exits with `exit_code` after this."""

    message: str
    exit_code: int


class StepReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of a step. Stats, sequences and steps come at most a few times a second."""

    deltas: tuple[SequenceDelta, ...] = ()
    started: tuple[str, ...] = ()  # request ids that left the queue in this step
    stats: EngineStats | None = None
    sequences: tuple[SequenceView, ...] | None = None
    steps: tuple[StepView, ...] = ()  # since the last report that had some
    logs: tuple[LogLine, ...] = ()  # warnings and errors of the engine process
    tables: tuple[Table, ...] = ()


ToEngine = Load | Submit | Abort | FetchTable | Vocabulary | Shutdown
FromEngine = Progress | Ready | Failed | StepReport
