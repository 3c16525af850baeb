"""The best of several answers to one prompt: those with the highest log probability per token.

Used by the server and by offline use alike, so that both choose the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.messages import SequenceDelta
    from appliance.engine.request import SamplingParams


@dataclass(slots=True)
class Likelihood:
    """Of one answer, the token that ends it included."""

    cumulative_logprob: float = 0.0
    num_tokens: int = 0

    def add(self, delta: SequenceDelta) -> None:
        """Count what a delta adds, if it reports log probabilities at all."""
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        elif delta.logprobs is not None:
            self.cumulative_logprob += sum(token.chosen.logprob for token in delta.logprobs)
        self.num_tokens += len(delta.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Per token; nothing is worse than an answer that time ran out for before its first."""
        return self.cumulative_logprob / self.num_tokens if self.num_tokens else -math.inf


def with_logprobs(sampling: SamplingParams) -> SamplingParams:
    """The same, with the log probabilities by which the best are found, if they are."""
    if sampling.takes_best and sampling.logprobs is None:
        return msgspec.structs.replace(sampling, logprobs=0)
    return sampling


def best(answers: Sequence[Likelihood], n: int) -> list[int]:
    """Places of the best `n`, best first; of equals the first one is better."""
    order = sorted(range(len(answers)), key=lambda place: -answers[place].mean_logprob)
    return order[:n]
