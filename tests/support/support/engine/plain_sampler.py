"""Plain sampling, one sequence after another: the engine's sampler must equal it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.plan import Continuations, Sampled
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.run.sampled_rows import BANNED, BROKEN
from appliance.kernels.sampling import batched
from appliance.kernels.sampling.ranking import likeliest
from appliance.kernels.sampling.rows import SamplingRows

_MASK64 = 2**64 - 1


def uniform_number(seed: int, index: int, position: int) -> float:
    """Two rounds of the SplitMix64 finalizer over the request's seed, the choice and the place."""
    x = (seed ^ (index * 0xD1342543DE82EF95) ^ (position * 0x9E3779B97F4A7C15)) & _MASK64
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return (x >> 11) / 2**53


def sample(
    logits: Tensor, sequences: Sequences[Sequence], eos_token_ids: tuple[int, ...]
) -> list[Sampled]:
    """The next token of each sequence from its row of logits (num_sequences, vocab_size)."""
    rows = zip(logits.clone(), sequences, strict=True)
    return [_sample(row, sequence, eos_token_ids) for row, sequence in rows]


def _sample(logits: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> Sampled:
    sampling = sequence.request.sampling
    raw = torch.log_softmax(logits, dim=-1)
    is_finite = bool(logits.amax().isfinite())
    bans = sequence.num_output_tokens < sampling.min_tokens
    scores = _adjusted(raw.clone(), sequence, eos_token_ids)
    settings = SamplingRows.of(
        [sampling.temperature],
        [sampling.top_k],
        [sampling.top_p],
        [sampling.min_p],
        [uniform_number(sampling.seed or 0, sequence.index, len(sequence.token_ids))],
    )
    adjusted = _adjusted(logits, sequence, eos_token_ids)
    token_id = int(batched.choose(adjusted[None], settings))
    if token_id < 0:
        return BANNED if bans and is_finite else BROKEN
    top: tuple[Candidate, ...] = ()
    if sampling.logprobs:
        top = _likeliest(raw, sampling.logprobs)
    report = None
    if sampling.logprobs is not None:
        report = TokenLogprobs(Candidate(token_id, raw[token_id].item()), top)
    beam = None
    if sampling.use_beam_search:
        count = min(sampling.num_candidates(eos_token_ids), len(scores))
        found = _likeliest(scores, count)
        beam = Continuations(tuple(c for c in found if math.isfinite(c.logprob)), top)
    return Sampled(token_id, report, continuations=beam)


def _likeliest(scores: Tensor, count: int) -> tuple[Candidate, ...]:
    values, token_ids = likeliest(scores[None], count)
    pairs = zip(token_ids[0].tolist(), values[0].tolist(), strict=True)
    return tuple(Candidate(token_id, value) for token_id, value in pairs)


def _adjusted(logits: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> Tensor:
    """One row (vocab_size,) with penalties, bias and bans."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids)
        values, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    answer = sequence.token_ids[sequence.num_prompt_tokens :]
    for token_id, count in Counter(answer).items():
        logits[token_id] -= torch.tensor(
            sampling.presence_penalty + sampling.frequency_penalty * count
        )
    for token_id, bias in sampling.bias_at(
        sequence.num_output_tokens, sequence.token_ids[sequence.num_prompt_tokens :]
    ).items():
        logits[token_id] += bias
    if sequence.num_output_tokens < sampling.min_tokens:
        logits[[*eos_token_ids, *sampling.stop_token_ids]] = -torch.inf
    return logits
