"""A client's request, frozen: the prompt as token ids and what is asked of it.

Crosses the process boundary, so these are msgspec structs. Imports no torch.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from appliance.engine.sampling_params import SamplingParams
from appliance.errors import RequestError

MAX_PRIORITY = 100  # and its negative
MAX_TIMEOUT = 86_400.0  # seconds


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the pool was used up
    ABORT = "abort"  # the client went away
    TIMEOUT = "timeout"  # the request's own timeout; the answer so far is valid
    ERROR = "error"  # the engine could not continue; the delta carries a message


class Pooling(Enum):
    """The hidden states of a prompt that stand for all of it."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
    CLS = "cls"  # the first token's, of an encoder


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter on this machine, in one version of its files.

    Args:
        name: for people.
        path: folder or file.
        stamp: of its files, see `files.stamp_of`; with another one it is another adapter.
        digest: of its content; only the engine knows it, like the next.
        slot: where it lies while the request lives.
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
    priority: int = 0  # lower is served earlier
    timeout: float | None = None  # seconds from arrival in the engine to the end
    max_queue_seconds: float | None = None  # seconds from arrival to start
    cache_salt: str = ""  # prefixes are shared only between equal salts
    owner: str = ""  # name of the API key, for dashboard and fairness; never the key
    stop_pieces: dict[int, bytes] = {}  # for beam search with stop strings, see `stop_pieces`
    pooling: Pooling | None = None  # ends it with its prompt, and a hidden state instead of tokens
    adapter: AdapterRef | None = None
    labels: tuple[int, ...] = ()  # with Pooling.LAST, the logits of these tokens instead of that
    second_text: int = 0  # of a pair that an encoder's head judges: the place where it begins

    @property
    def generates(self) -> bool:
        """True if there is an answer beyond scores of the prompt."""
        return self.sampling.max_tokens != 0

    @property
    def to_read(self) -> range:
        """Places of the prompt whose rows must run for more than keys and values."""
        length = len(self.prompt_token_ids)
        if self.pooling is not None:
            return {
                Pooling.MEAN: range(length),
                Pooling.CLS: range(1),
                Pooling.LAST: range(length - 1, length),
            }[self.pooling]
        return range(0 if self.sampling.prompt_logprobs is None else length - 1)

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
