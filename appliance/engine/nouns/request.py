"""A client's request, frozen: the prompt as token ids, sampling, terms.

A msgspec struct, because it crosses the process boundary. Imports no torch.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from appliance.engine.nouns.picture import PromptPictures
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import RequestError

MAX_PRIORITY = 100  # or its negative
MAX_TIMEOUT = 86_400.0  # seconds


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV cache is exhausted
    ABORT = "abort"  # the client disconnected
    TIMEOUT = "timeout"  # the request's own timeout; the answer so far is valid
    ERROR = "error"  # the engine could not continue; the delta has a message


class Pooling(Enum):
    """Reduction of a prompt's hidden states to one."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
    CLS = "cls"  # the first token's, in an encoder


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter on this machine, in one version of its files.

    Args:
        path: folder or file.
        stamp: of its files, see `files.stamp_of`; a different one means a different adapter.
        digest: of its content; only the engine knows it and the slot.
        slot: its place while the request lives.
    """

    name: str
    path: str
    stamp: str
    digest: str = ""
    slot: int = -1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier
    timeout: float | None = None  # seconds from arrival in the engine to the end
    max_queue_seconds: float | None = None  # seconds from arrival to start
    cache_salt: str = ""  # requests share prefixes only with equal salts
    owner: str = ""  # name of the API key, for dashboard and fairness; never the key
    stop_pieces: dict[int, bytes] = {}  # for beam search with stop strings, see `stop_pieces`
    pooling: Pooling | None = None  # read the prompt only and return a pooled hidden state
    adapter: AdapterRef | None = None
    labels: tuple[int, ...] = ()  # with Pooling.LAST, return these tokens' logits instead
    second_text: int = 0  # in a pair for an encoder's head: index at which it begins
    pictures: PromptPictures | None = None  # whose rows have placeholders among the prompt's ids

    def ids(self) -> list[int]:
        """Return the prompt's ids as a sequence has them: rows of pictures by content, below 0."""
        ids = self.prompt_token_ids
        return list(ids) if self.pictures is None else self.pictures.ids(ids)

    @property
    def generates(self) -> bool:
        """True if the request wants more than scores of the prompt."""
        return self.sampling.max_tokens != 0

    @property
    def to_read(self) -> range:
        """Positions of the prompt that need more than keys and values."""
        length = len(self.prompt_token_ids)
        if self.pooling is not None:
            return {
                Pooling.MEAN: range(length),
                Pooling.CLS: range(1),
                Pooling.LAST: range(length - 1, length),
            }[self.pooling]
        if self.sampling.prompt_logprobs is None:
            return range(0)
        # No token stands in a picture's row.
        start = 0 if self.pictures is None else self.pictures.spans[-1].stop - 1
        return range(start, length - 1)

    def __post_init__(self) -> None:
        if self.sampling.max_tokens == 0 and (
            self.pooling is None and self.sampling.prompt_logprobs is None
        ):
            raise RequestError(
                "max_tokens is 0, and nothing is asked of the prompt; ask for at least one token",
                param="max_tokens",
            )
        if self.sampling.max_tokens == 0 and self.sampling.num_sequences > 1:
            raise RequestError("max_tokens is 0, so there are no answers; ask for n 1", param="n")
        if self.pooling is not None:
            assert self.sampling.max_tokens == 0, "an answer beside a hidden state"
        assert not self.labels or self.pooling is Pooling.LAST, "labels of what?"
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, "
                f"got {self.priority}; lower is served earlier",
                param="priority",
            )
        if self.timeout is not None and not 0 < self.timeout <= MAX_TIMEOUT:
            raise RequestError(
                f"timeout must be more than 0 and at most {MAX_TIMEOUT:g} seconds, "
                f"got {self.timeout:g}",
                param="timeout",
            )
