"""A step's samples on their way to the host, and their results there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.plan import Continuations, Sampled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.nouns.plan import ScheduledSequence


BANNED = Sampled(error="logit_bias, min_tokens and grammar together ban every token")
BROKEN = Sampled(error="the model produced no finite logits for this sequence", broken=True)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the rows that report them, before penalties and temperature."""

    rows: Sequences[int]
    chosen: Tensor  # (num_rows,) float32
    top: Tensor  # (num_rows, largest requested number) float32
    top_ids: Tensor  # int64

    def read(self, tokens: list[int], entries: Sequences[ScheduledSequence]) -> _Reports:
        parts = (self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        reports = {}
        for row, chosen, ids, values in zip(self.rows, *parts, strict=True):
            count = entries[row].sequence.request.sampling.logprobs
            pairs = zip(ids[:count], values[:count], strict=True)
            top = tuple([Candidate(*pair) for pair in pairs])
            reports[row] = TokenLogprobs(Candidate(tokens[row], chosen), top)
        return reports


_Reports = dict[int, TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Continuations of beams' rows, likeliest first."""

    places: dict[int, tuple[int, int]]  # by row: its index, and its number of candidates
    scores: Tensor  # (num_beams, largest count) float32
    token_ids: Tensor  # int64

    def of(self, row: int) -> tuple[Candidate, ...]:
        place, count = self.places[row]
        ids, scores = self.token_ids[place, :count], self.scores[place, :count]
        pairs = zip(ids.tolist(), scores.tolist(), strict=True)
        return tuple([Candidate(*pair) for pair in pairs if math.isfinite(pair[1])])


@dataclass(frozen=True, slots=True)
class SampledRows:
    entries: Sequences[ScheduledSequence]
    tokens: Tensor  # (at least num_entries,) int64
    banned: list[int]  # rows with banned tokens
    largest: Tensor | None  # (num_rows,) largest logits before bans; None without such rows
    logprobs: Logprobs | None
    candidates: Candidates | None = None
    errors: Mapping[int, str] = field(default_factory=dict)  # by row, why no token is allowed

    def read(self) -> list[Sampled]:
        """Return one result per entry; call it after an event recorded after the copies."""
        tokens: list[int] = self.tokens.tolist()[: len(self.entries)]
        reports = {} if self.logprobs is None else self.logprobs.read(tokens, self.entries)
        places = {} if self.candidates is None else self.candidates.places
        if not (reports or places):
            return [
                Sampled(token_id) if token_id >= 0 else self._reason(row)
                for row, token_id in enumerate(tokens)
            ]
        results = []
        for row, token_id in enumerate(tokens):
            if token_id < 0:
                results.append(self._reason(row))
                continue
            report, beam = reports.get(row), None
            if row in places:
                assert self.candidates is not None
                beam = Continuations(self.candidates.of(row), () if report is None else report.top)
            results.append(Sampled(token_id, report, continuations=beam))
        return results

    def _reason(self, row: int) -> Sampled:
        if row in self.errors:
            return Sampled(error=self.errors[row])
        if row in self.banned:
            assert self.largest is not None
            if math.isfinite(float(self.largest[row])):
                return BANNED
        return BROKEN
