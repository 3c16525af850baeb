"""The closed schema between the API process and the engine process.

Every frame on the socket is one of `ToEngine` or `FromEngine`, as MessagePack behind a 4-byte
little-endian length. Nothing here can carry code. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from appliance.config import EngineConfig
from appliance.engine.request import AdapterRef, FinishReason, Request
from appliance.stats import EngineStats, LogLine, StepView
from appliance.stats import SequenceView as SequenceView


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message: the settings to load, the memory, see `Admission`, and the log's form."""

    config: EngineConfig
    gpu: str = ""  # index or id of the only GPU that the process may see; empty for all
    memory_limit: int | None = None
    is_shared: bool = False
    log_level: str = "info"
    log_format: str = "text"


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Planned`: the memory may be taken."""


class EndTokens(msgspec.Struct, frozen=True, tag=True):
    """The answer to `WeightsRead`: the ids of the tokens that end an answer."""

    ids: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag=True):
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
    in_order: bool = False  # ids follow the order of merges, see `grammars.merge_order`


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter ahead of its first request; an `AdapterAnswer` follows."""

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
    num_draft_tokens: int = 0  # proposed for this choice so far
    num_accepted_tokens: int = 0  # of these, accepted
    queue_seconds: float | None = None  # on the first delta: time in the engine's queue
    cumulative_logprob: float | None = None  # of an answer of beam search, which is one delta
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the next tokens of the prompt
    pooled: bytes | None = None  # float32, the hidden state that stands for the prompt, or labels

    def one_by_one(self) -> Iterator[SequenceDelta]:
        """Yield the tokens of a run in a delta each, for readers that may end between two.

        An answer of beam search stays whole: it was ended by whom found it.
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
    """The blocks of a sequence, in logical order; none if it is not live."""

    request_id: str
    index: int
    num_tokens: int = 0  # in the cache
    blocks: tuple[int, ...] = ()
    hashes: bytes = b""  # of the full blocks, 16 bytes each


class AdapterAnswer(msgspec.Struct, frozen=True):
    """An adapter was read; `error` says why it cannot be used."""

    ref: AdapterRef
    error: str = ""


class Progress(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int
    total: int


class Planned(msgspec.Struct, frozen=True, tag=True):
    """The memory is planned and not taken; the engine waits for `Proceed`."""

    needed_bytes: int
    free_bytes: int  # that may be used now


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """The engine waits for `EndTokens`, which the tokenizer knows; that is read meanwhile."""


class RankInfo(msgspec.Struct, frozen=True):
    """A process that holds a part of the model.

    Attributes:
        share: of the model, beside those of the other ranks.
        weight_bytes: that it holds.
    """

    pid: int
    share: int
    threads: int
    weight_bytes: int


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
    num_blocks: int  # 0 for an encoder
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
    hidden_size: int = 0  # numbers in a hidden state
    num_experts: int = 0  # of a layer that chooses experts; 0 without such layers
    experts_per_token: int = 0
    process_bytes: int = 0  # of the engine's process besides; 0 if that is other memory
    state_bytes: int = 0  # of all rows of recurrent state; 0 without recurrent layers
    num_checkpoints: int = 0  # of these rows, those beside a slot for each sequence
    stages: tuple[tuple[str, float], ...] = ()  # of the start: name, monotonic seconds at its end
    num_adapters: int = 0  # that steps may mix; 0 if requests cannot ask for one
    adapter_bytes: int = 0  # planned for these
    ranks: tuple[RankInfo, ...] = ()  # the engine's process first; none if it has the whole model
    ranks_pairs: bool = False  # an encoder with a head for that
    drafts: str = ""  # what drafts and takes memory, in words
    draft_bytes: int = 0  # planned for that, without its part of the KV cache


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts requests."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
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
FromEngine = Progress | Planned | WeightsRead | Ready | StartFailed | StepReport
