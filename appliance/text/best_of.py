"""Selects the answers with the highest mean log probability per token.

The server and offline use share it, so both select the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.sampling_params import SamplingParams


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
