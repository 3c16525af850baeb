"""Text from token ids, and what the engine needs of the tokenizer, which it has not.

The server and offline use share it, so both end an answer at the same character and select the same
answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.merge_order import MergeOrder
from appliance.engine.nouns.messages import Vocabulary
from appliance.engine.nouns.request import FinishReason
from appliance.tokenizer import DecodeStream, StopStringMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.tokenizer import Tokenizer

# The kind of text that schemas and tools fix: names, quotes, words and figures.
_SAMPLE = (
    '{"first_name": "Bob", "currentTemperature": 21, "is_raining": false, "HTTPServerError": null,'
    ' "name": "get_weather", "arguments": {"unit": "celsius or fahrenheit", "zip-code": [75002]}}'
)


class ChoiceText:
    """The growing text of one choice.

    Args:
        shown: control tokens to emit as text, for parsers.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], shown: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = DecodeStream(tokenizer, shown)
        self._matcher = StopStringMatcher(stop)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._matcher.matched

    def push(
        self, token_ids: tuple[int, ...], finish_reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Add tokens; return the text that is final and the finish reason, if any.

        Holds back text that may begin a stop string.
        """
        text, matched = self._matcher.push(self._decoder.push(token_ids))
        if not matched and finish_reason is not None:
            rest, matched = self._matcher.push(self._decoder.flush())
            text += rest
            if not matched:
                text += self._matcher.flush()
        return text, FinishReason.STOP if matched else finish_reason


@dataclass(slots=True)
class Likelihood:
    """Sum of an answer's log probabilities, its final token's included."""

    cumulative_logprob: float = 0.0
    num_tokens: int = 0

    def add(self, delta: SequenceDelta) -> None:
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        elif delta.logprobs is not None:
            self.cumulative_logprob += sum(token.chosen.logprob for token in delta.logprobs)
        self.num_tokens += len(delta.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean per token; -inf for an answer that timed out before its first token."""
        return self.cumulative_logprob / self.num_tokens if self.num_tokens else -math.inf


def with_logprobs(sampling: SamplingParams) -> SamplingParams:
    """Request log probabilities if best_of needs them."""
    if sampling.takes_best and sampling.logprobs is None:
        return msgspec.structs.replace(sampling, logprobs=0)
    return sampling


def best(answers: Sequence[Likelihood], n: int) -> list[int]:
    """Return the indices of the best `n`, best first; the earlier one wins a tie."""
    order = sorted(range(len(answers)), key=lambda place: -answers[place].mean_logprob)
    return order[:n]


def stop_pieces(tokenizer: Tokenizer, sampling: SamplingParams) -> dict[int, bytes]:
    """Return bytes by token id for `Request.stop_pieces`; empty unless beams have stop strings.

    Takes 0.1 s for a large vocabulary; cached per set of strings.
    """
    if not (sampling.use_beam_search and sampling.stop):
        return {}
    return _pieces(tokenizer, sampling.stop)


@lru_cache(maxsize=32)
def _pieces(tokenizer: Tokenizer, stop: tuple[str, ...]) -> dict[int, bytes]:
    wanted = [string.encode() for string in stop]
    starts = tuple({one[:end] for one in wanted for end in range(1, len(one) + 1)})
    ends = tuple({one[start:] for one in wanted for start in range(len(one))})
    pieces = {}
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.visible_bytes(token_id)
        if (
            not piece  # an invisible token joins its neighbours
            or piece.endswith(starts)
            or piece.startswith(ends)
            or any(piece in one or one in piece for one in wanted)
        ):
            pieces[token_id] = piece
    return pieces


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer's vocabulary; takes some tenths of a second for a large one."""
    tokens, special = tokenizer.vocabulary()
    found = Vocabulary(tuple(tokens), tuple(special))
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    text = b"".join(tokens[token_id] for token_id in ids)
    return Vocabulary(found.tokens, found.special, in_order=MergeOrder(found)(text) == ids)
