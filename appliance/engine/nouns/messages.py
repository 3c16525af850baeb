"""The closed schema between the API process and the engine process.

Every frame on the socket is one `ToEngine` or `FromEngine`: MessagePack after a 4-byte
little-endian length. Nothing here can carry code. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from appliance.config import EngineConfig
from appliance.engine.nouns.request import AdapterRef, FinishReason, Request
from appliance.stats import EngineStats, LogLine, RankInfo, StepView
from appliance.stats import SequenceView as SequenceView


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message: settings, memory (see `Admission`) and log format."""

    config: EngineConfig
    gpu: str = ""  # index or id of the process's only GPU; empty for all
    memory_limit: int | None = None
    is_shared: bool = False
    log_level: str = "info"
    log_format: str = "text"


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """Answers `MemoryPlanned`: the engine may take the memory."""


class EndTokens(msgspec.Struct, frozen=True, tag=True):
    """Answers `WeightsRead`: ids of the tokens that end an answer."""

    ids: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request in any phase and free its blocks; the engine ignores unknown ids."""

    request_id: str
    index: int | None = None  # one choice only; None means all of them


class FetchTable(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    index: int


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The model's tokens, for grammars; sent before the first request with one."""

    tokens: tuple[bytes, ...]  # by id; empty for an id without text
    special: tuple[int, ...]  # ids that no text contains
    in_order: bool = False  # ids are in merge order, see `grammars.merge_order`


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter before its first request; an `AdapterAnswer` follows."""

    ref: AdapterRef


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter once no request uses it."""

    ref: AdapterRef


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process after the current step."""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One token and its log probability (natural logarithm)."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token, then the likeliest ones in descending order."""

    chosen: Candidate
    top: tuple[Candidate, ...]


class SequenceDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens, or the end, that one step added to one choice."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR
    refused: bool = False  # the request itself is at fault
    expired: bool = False  # it waited too long and never started
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_draft_tokens: int = 0  # drafted for this choice so far
    num_accepted_tokens: int = 0  # of these, accepted
    queue_seconds: float | None = None  # on the first delta: time in the engine's queue
    cumulative_logprob: float | None = None  # of a beam search answer, which is one delta
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt's next tokens
    pooled: bytes | None = None  # float32: the prompt's pooled hidden state, or labels' logits

    def one_by_one(self) -> Iterator[SequenceDelta]:
        """Yield a delta per token, for readers that may end between two.

        A beam search answer stays whole: the search has ended it already.
        """
        last = len(self.token_ids) - 1
        if last < 1 or self.cumulative_logprob is not None:
            yield self
            return
        for place, token_id in enumerate(self.token_ids):
            yield msgspec.structs.replace(
                self,
                token_ids=(token_id,),
                logprobs=None if self.logprobs is None else (self.logprobs[place],),
                finish_reason=self.finish_reason if place == last else None,
            )


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence's blocks, in logical order; empty if it is not live."""

    request_id: str
    index: int
    num_tokens: int = 0  # in the cache
    blocks: tuple[int, ...] = ()
    hashes: bytes = b""  # of the full blocks, 16 bytes each


class AdapterAnswer(msgspec.Struct, frozen=True):
    """An adapter was read; `error` is the reason if it is unusable."""

    ref: AdapterRef
    error: str = ""


class Progress(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int
    total: int


class MemoryPlanned(msgspec.Struct, frozen=True, tag=True):
    """The memory plan; the engine waits for `Proceed` before it takes memory."""

    needed_bytes: int
    free_bytes: int  # available now


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """The weights are read; the engine waits for `EndTokens`, which the tokenizer gives."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model and its memory layout; bytes unless noted."""

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
    num_blocks: int  # 0 for an encoder
    max_num_seqs: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    memory_bytes: int  # the device's, when memory was planned
    load_seconds: float
    fingerprint: str  # of weights, formats and engine version
    precisions: tuple[str, ...] = ()  # by the index in a block's word; kv_format if empty
    notes: tuple[str, ...] = ()  # fallbacks taken
    unused_gpu: str = ""  # why a GPU that is here computes nothing; among the notes too
    kv_host_bytes: int = 0  # host memory for evicted blocks
    num_parameters: int = 0  # weights, a tied head's once; 0 if unknown
    hidden_size: int = 0  # width of a hidden state
    projector: str = ""  # path of the GGUF file with the vision tower, if there is one
    num_experts: int = 0  # per MoE layer; 0 without such layers
    experts_per_token: int = 0
    process_bytes: int = 0  # the rest of the engine's process; 0 if that is other memory
    kv_host_is_pinned: bool = False  # taken at the start, for copies beside steps
    state_bytes: int = 0  # of all rows of recurrent state; 0 without recurrent layers
    state_format: str = "fp32"  # of their numbers
    num_checkpoints: int = 0  # the rows beyond one slot per sequence
    stages: tuple[tuple[str, float], ...] = ()  # of the start: name, monotonic end time
    num_adapters: int = 0  # that a step may mix; 0 if requests cannot use one
    adapter_bytes: int = 0  # planned for adapters
    ranks: tuple[RankInfo, ...] = ()  # the engine's process first; empty for a single one
    ranks_pairs: bool = False  # an encoder with a ranking head
    drafts: str = ""  # description of a drafter that takes memory
    draft_bytes: int = 0  # planned for the drafter, without its part of the KV cache
    reads_pictures: bool = False
    picture_bytes: int = 0  # planned for the vision tower, its workspace and the rows kept


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts requests."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; it then exits with `exit_code`."""

    message: str
    exit_code: int


class StepReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of a step; stats, sequences and steps come at most a few times per second."""

    deltas: tuple[SequenceDelta, ...] = ()
    started: tuple[str, ...] = ()  # request ids that left the queue in this step
    stats: EngineStats | None = None
    sequences: tuple[SequenceView, ...] | None = None
    steps: tuple[StepView, ...] = ()  # since the last report with steps
    logs: tuple[LogLine, ...] = ()  # warnings and errors of the engine process
    tables: tuple[Table, ...] = ()
    adapters: tuple[AdapterAnswer, ...] = ()


ToEngine = (
    Load
    | Proceed
    | EndTokens
    | Submit
    | Abort
    | FetchTable
    | Vocabulary
    | LoadAdapter
    | UnloadAdapter
    | Shutdown
)
FromEngine = Progress | MemoryPlanned | WeightsRead | Ready | StartFailed | StepReport
