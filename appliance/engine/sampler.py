"""From logits to the next token of each sequence: penalties, bans, choice and log probabilities.

Reads sequences, never changes them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from appliance.engine.beams.beam_search import num_candidates
from appliance.engine.messages import Candidate, TokenLogprobs
from appliance.engine.plan import Continuations
from appliance.kernels.sampling import SamplingRows
from appliance.kernels.sampling.ranking import likeliest

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.sequence import Sequence

_MASK64 = 2**64 - 1


class Sampled(NamedTuple):
    """What one sequence got: a token, or the reason why there is none."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    broken: bool = False  # the model's fault, not the request's
    continuations: Continuations | None = None  # of a beam


BANNED = Sampled(error="logit_bias and min_tokens together ban every token")
BROKEN = Sampled(error="the model produced no finite logits for this sequence", broken=True)


def uniform_number(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed, the choice and the position only.

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood 2014) over the three integers.
    """
    x = (seed ^ (index * 0xD1342543DE82EF95) ^ (position * 0x9E3779B97F4A7C15)) & _MASK64
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return (x >> 11) / 2**53


def candidates_of(token_ids: list[int], logprobs: list[float]) -> tuple[Candidate, ...]:
    """Tokens with their log probabilities, those that are banned left out."""
    pairs = zip(token_ids, logprobs, strict=True)
    return tuple(Candidate(*pair) for pair in pairs if math.isfinite(pair[1]))


class ChooseTokens(Protocol):
    """Draws a token per row: `kernels.sampling`'s, in torch or in the CPU library."""

    def __call__(self, logits: Tensor, rows: SamplingRows) -> list[int]:
        """Choose from logits (num_rows, vocab_size) float32, which stay as they are.

        Returns:
            Token ids; a negative number for a row with NaN, +inf or no finite value.
        """
        ...


class Sampler:
    """Samples one token per sequence; a sequence's result never depends on its neighbours.

    Args:
        eos_token_ids: tokens that end an answer.
        choose_tokens: draws from the adjusted logits.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], choose_tokens: ChooseTokens) -> None:
        self._eos_token_ids = eos_token_ids
        self._choose_tokens = choose_tokens

    def sample(self, logits: Tensor, sequences: Sequences[Sequence]) -> list[Sampled]:
        """Choose the next token of each sequence.

        Args:
            logits: (num_sequences, vocab_size) float32; changed in place.
            sequences: in the order of the rows, with all their tokens so far.

        Returns:
            One result per sequence. A row without a finite maximum is an error of that sequence
            alone: NaN from the model, or every token banned by the request itself.
        """
        raw_logprobs = self._raw_logprobs(logits, sequences)
        candidates = self._candidates(logits, sequences)
        adjusted = [i for i, sequence in enumerate(sequences) if self._is_adjusted(sequence)]
        usable = {row for row in adjusted if bool(logits[row].amax().isfinite())}
        for row in adjusted:
            self._adjust(logits[row], sequences[row])
        tokens = self._choose_tokens(logits, self._rows(sequences, logits.device))
        results = []
        for row, (sequence, token_id) in enumerate(zip(sequences, tokens, strict=True)):
            if token_id < 0:
                results.append(BANNED if row in usable else BROKEN)
                continue
            report = self._report(raw_logprobs.get(row), sequence, token_id)
            beam = None
            if row in candidates:
                beam = Continuations(candidates[row], () if report is None else report.top)
            results.append(Sampled(token_id, report, continuations=beam))
        return results

    @staticmethod
    def _is_adjusted(sequence: Sequence) -> bool:
        sampling = sequence.request.sampling
        return bool(
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.bias_at(sequence.num_output_tokens)
            or sequence.num_output_tokens < sampling.min_tokens
        )

    def _adjust(self, logits: Tensor, sequence: Sequence) -> None:
        """Apply bias, penalties and bans to one row (vocab_size,) in place."""
        sampling = sequence.request.sampling
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sequence.token_ids, device=logits.device)
            values = logits[seen]
            penalty = sampling.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if sequence.num_output_tokens and (sampling.presence_penalty or sampling.frequency_penalty):
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            counts = Counter(answer)
            penalties = [
                sampling.presence_penalty + sampling.frequency_penalty * count
                for count in counts.values()
            ]
            logits[list(counts)] -= torch.tensor(penalties, device=logits.device)
        for token_id, bias in sampling.bias_at(sequence.num_output_tokens).items():
            logits[token_id] += bias
        if sequence.num_output_tokens < sampling.min_tokens:
            logits[[*self._eos_token_ids, *sampling.stop_token_ids]] = -torch.inf

    @staticmethod
    def _rows(sequences: Sequences[Sequence], device: torch.device) -> SamplingRows:
        sampling = [sequence.request.sampling for sequence in sequences]
        return SamplingRows.of(
            [s.temperature for s in sampling],
            [s.top_k for s in sampling],
            [s.top_p for s in sampling],
            [s.min_p for s in sampling],
            [
                uniform_number(s.request.sampling.seed or 0, s.index, len(s.token_ids))
                for s in sequences
            ],
            device=device,
        )

    @staticmethod
    def _raw_logprobs(logits: Tensor, sequences: Sequences[Sequence]) -> dict[int, Tensor]:
        """Log probabilities of the rows that report them, before any penalty or temperature."""
        rows = [i for i, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
        if not rows:
            return {}
        return dict(zip(rows, torch.log_softmax(logits[rows], dim=-1), strict=True))

    def _candidates(
        self, logits: Tensor, sequences: Sequences[Sequence]
    ) -> dict[int, tuple[Candidate, ...]]:
        """What may follow each beam: log probabilities, then bias and bans, as transformers."""
        rows = [i for i, s in enumerate(sequences) if s.request.sampling.use_beam_search]
        if not rows:
            return {}
        scores = torch.log_softmax(logits[rows], dim=-1)
        counts = []
        for place, row in enumerate(rows):
            if self._is_adjusted(sequences[row]):
                self._adjust(scores[place], sequences[row])
            counts.append(num_candidates(sequences[row].request.sampling, self._eos_token_ids))
        best, token_ids = likeliest(scores, min(max(counts), scores.shape[-1]))
        pairs = zip(rows, counts, token_ids.tolist(), best.tolist(), strict=True)
        return {row: candidates_of(ids[:count], found[:count]) for row, count, ids, found in pairs}

    @staticmethod
    def _report(logprobs: Tensor | None, sequence: Sequence, token_id: int) -> TokenLogprobs | None:
        if logprobs is None:
            return None
        top: tuple[Candidate, ...] = ()
        if count := sequence.request.sampling.logprobs:
            values, token_ids = likeliest(logprobs[None], count)
            pairs = zip(token_ids[0].tolist(), values[0].tolist(), strict=True)
            top = tuple(Candidate(candidate, value) for candidate, value in pairs)
        return TokenLogprobs(Candidate(token_id, logprobs[token_id].item()), top)
