"""Sampling that leaves the tokens on the device, and what the host makes of them a step later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from appliance.engine.beams.beam_search import num_candidates
from appliance.engine.device.adjustments import AdjustmentList
from appliance.engine.messages import Candidate, TokenLogprobs
from appliance.engine.plan import Continuations
from appliance.engine.sampler import BANNED, BROKEN, Sampled, candidates_of
from appliance.kernels.sampling.adjust import adjust
from appliance.kernels.sampling.ranking import likeliest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.device.device import Device
    from appliance.engine.plan import ScheduledSequence
    from appliance.kernels.sampling import SamplingRows

_MASK64 = 2**64 - 1


class SampleTokens(Protocol):
    """Draws a token per row and waits for nothing: `kernels.sampling`'s, in Triton or in torch."""

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Choose from logits (num_rows, vocab_size) float32, which stay as they are.

        Returns:
            (num_rows,) int64 token ids; negative for a row with NaN, +inf or no finite value.
        """
        ...


def uniform_numbers(entries: Iterable[ScheduledSequence]) -> NDArray[np.float64]:
    """`sampler.uniform_number` of each sequence for the token that its entry samples."""
    keys = [
        (
            (entry.sequence.request.sampling.seed or 0) & _MASK64,
            entry.sequence.index,
            entry.end,
        )
        for entry in entries
    ]
    seed, index, position = np.array(keys, dtype=np.uint64).reshape(-1, 3).T
    x = seed ^ (index * np.uint64(0xD1342543DE82EF95)) ^ (position * np.uint64(0x9E3779B97F4A7C15))
    for _ in range(2):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    numbers: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) / 2**53
    return numbers


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of the rows that report them; before any penalty or temperature."""

    rows: list[int]
    chosen: Tensor  # (num_rows,) float32
    top: Tensor  # (num_rows, most that is asked for) float32
    top_ids: Tensor  # int64


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What may follow the rows of beams, likeliest first."""

    places: dict[int, tuple[int, int]]  # of a row, and how many count
    scores: Tensor  # (num_beams, most of them) float32
    token_ids: Tensor  # int64

    def of(self, row: int) -> tuple[Candidate, ...]:
        """Those of one row."""
        place, count = self.places[row]
        ids, scores = self.token_ids[place, :count], self.scores[place, :count]
        return candidates_of(ids.tolist(), scores.tolist())


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step sampled, on its way to the host."""

    entries: Sequences[ScheduledSequence]
    tokens: Tensor  # (num_rows,) int64
    largest: dict[int, Tensor]  # rows that were adjusted: their largest logit before, a scalar
    logprobs: _Logprobs | None
    candidates: _Candidates | None = None

    def read(self) -> list[Sampled]:
        """One result per entry, once an event recorded after the copies has come."""
        return [
            self._result(row, entry, token_id)
            for row, (entry, token_id) in enumerate(
                zip(self.entries, self.tokens.tolist(), strict=True)
            )
        ]

    def _result(self, row: int, entry: ScheduledSequence, token_id: int) -> Sampled:
        if token_id >= 0:
            report = self._report(row, entry, token_id)
            beam = None
            if self.candidates is not None and row in self.candidates.places:
                top = () if report is None else report.top
                beam = Continuations(self.candidates.of(row), top)
            return Sampled(token_id, report, continuations=beam)
        if row in self.largest and bool(self.largest[row].isfinite()):
            return BANNED
        return BROKEN

    def _report(self, row: int, entry: ScheduledSequence, token_id: int) -> TokenLogprobs | None:
        count = entry.sequence.request.sampling.logprobs
        if count is None:
            return None
        assert self.logprobs is not None
        place = self.logprobs.rows.index(row)
        pairs = zip(
            self.logprobs.top_ids[place, :count].tolist(),
            self.logprobs.top[place, :count].tolist(),
            strict=True,
        )
        return TokenLogprobs(
            Candidate(token_id, self.logprobs.chosen[place].item()),
            tuple(Candidate(candidate, value) for candidate, value in pairs),
        )


class DeviceSampler:
    """Samples one token per row; a row's result never depends on its neighbours.

    Args:
        eos_token_ids: tokens that end an answer.
        sample_tokens: draws from the adjusted logits.
        device: where the logits are.
    """

    def __init__(
        self, eos_token_ids: tuple[int, ...], sample_tokens: SampleTokens, device: Device
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self.sample_tokens = sample_tokens
        self._device = device

    def launch(
        self,
        logits: Tensor,
        entries: Sequences[ScheduledSequence],
        rows: SamplingRows,
        latest: Tensor,
        drawn: Tensor | None = None,
    ) -> SampledRows:
        """Enqueue all that it takes to choose the next token of each entry.

        Args:
            logits: (num_entries, vocab_size) float32; changed in place.
            entries: in the order of the rows; penalties read the sequences' tokens so far.
            rows: settings of each.
            latest: (at least num_entries,) int64, gets the tokens, 0 where there is none.
            drawn: (num_entries,) int64, what `sample_tokens` has made of the same logits already;
                it counts unless they are adjusted.
        """
        adjustments = AdjustmentList(self._eos_token_ids)
        for row, entry in enumerate(entries):
            num_output_tokens = entry.end - entry.sequence.num_prompt_tokens
            adjustments.add(row, entry.sequence, num_output_tokens)
        reported = [
            row
            for row, entry in enumerate(entries)
            if entry.sequence.request.sampling.logprobs is not None
        ]
        index = self._device.send(torch.tensor(reported)) if reported else None
        raw = None if index is None else torch.log_softmax(logits[index], dim=-1)
        candidates = self._candidates(logits, entries)
        largest = {}
        if adjustments.changed:
            drawn = None
            changed = self._device.send(torch.tensor(adjustments.changed))
            maxima = self._device.fetch(logits[changed].amax(dim=-1))
            largest = dict(zip(adjustments.changed, maxima.unbind(), strict=True))
            adjust(logits, adjustments.send(self._device))
        tokens = self.sample_tokens(logits, rows) if drawn is None else drawn
        torch.clamp(tokens, min=0, out=latest[: len(tokens)])
        logprobs = None
        if raw is not None:
            chosen = raw.gather(1, latest[: len(tokens)][index][:, None])[:, 0]
            most = max(entries[row].sequence.request.sampling.logprobs or 0 for row in reported)
            top, top_ids = likeliest(raw, most)
            fetch = self._device.fetch
            logprobs = _Logprobs(reported, fetch(chosen), fetch(top), fetch(top_ids))
        return SampledRows(entries, self._device.fetch(tokens), largest, logprobs, candidates)

    def _candidates(
        self, logits: Tensor, entries: Sequences[ScheduledSequence]
    ) -> _Candidates | None:
        """As `Sampler` does: log probabilities, then bias and bans."""
        rows = [
            row
            for row, entry in enumerate(entries)
            if entry.sequence.request.sampling.use_beam_search
        ]
        if not rows:
            return None
        scores = torch.log_softmax(logits[self._device.send(torch.tensor(rows))], dim=-1)
        adjustments = AdjustmentList(self._eos_token_ids)
        places = {}
        for place, row in enumerate(rows):
            sequence, end = entries[row].sequence, entries[row].end
            adjustments.add(place, sequence, end - sequence.num_prompt_tokens)
            sampling = sequence.request.sampling
            places[row] = (place, num_candidates(sampling, self._eos_token_ids))
        if adjustments.changed:
            adjust(scores, adjustments.send(self._device))
        most = min(max(count for _, count in places.values()), scores.shape[-1])
        values, token_ids = likeliest(scores, most)
        return _Candidates(places, self._device.fetch(values), self._device.fetch(token_ids))
