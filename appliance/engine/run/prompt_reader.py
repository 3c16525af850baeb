"""Reads prompts: scores their tokens, or pools their hidden states.

The logits of a whole step would take hundreds of megabytes, so it makes them for a few rows at a
time, and keeps only the next token and the likeliest ones of each.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.nouns.limits import LOGIT_ROWS
from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.plan import Sampled
from appliance.engine.run.sampled_rows import BROKEN
from appliance.kernels import arrays
from appliance.kernels.operations import TokenScores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.nouns.plan import Plan, ScheduledSequence
    from appliance.engine.run.device import Device
    from appliance.kernels.operations import ScoreTokens
    from appliance.model.executor import Executor


@dataclass(frozen=True, slots=True)
class PromptReading:
    """The rows of a step whose hidden states are read.

    Attributes:
        entries: all that yield something, in plan order.
        scored: those whose prompt's tokens get log probabilities.
        pooled: those whose hidden states are summed.
        labelled: those whose last row gives a few logits.
        rows: the step's rows with a result, without repetition; sampling rows come first.
        read: indices in `rows` of the rows read: the scored entries', the pooled, the labelled.
    """

    entries: Sequences[ScheduledSequence]
    scored: Sequences[ScheduledSequence]
    pooled: Sequences[ScheduledSequence]
    labelled: Sequences[ScheduledSequence]
    rows: Sequences[int]
    read: Sequences[int]

    @classmethod
    def of(cls, plan: Plan) -> PromptReading | None:
        """Collect the rows that one step reads; None if it reads none."""
        if not any(entry.read for entry in plan.scheduled):
            return None
        ends = list(accumulate([entry.num_tokens for entry in plan.scheduled]))
        scored: list[tuple[ScheduledSequence, int]] = []
        pooled: list[tuple[ScheduledSequence, int]] = []
        labelled: list[tuple[ScheduledSequence, int]] = []
        for entry, end in zip(plan.scheduled, ends, strict=True):
            if entry.read:
                request = entry.sequence.request
                to = scored if request.pooling is None else labelled if request.labels else pooled
                to.append((entry, end - entry.end))
        pairs = zip(plan.scheduled, ends, strict=True)
        sampled = [
            row
            for entry, end in pairs
            if entry.samples
            for row in range(end - entry.num_results, end)
        ]
        shifted = (*scored, *pooled, *labelled)
        read = [place + shift for entry, shift in shifted for place in entry.read]
        rows = list(dict.fromkeys((*sampled, *read)))
        places = {row: place for place, row in enumerate(rows)}
        return cls(
            entries=[entry for entry in plan.scheduled if entry.yields],
            scored=[entry for entry, _ in scored],
            pooled=[entry for entry, _ in pooled],
            labelled=[entry for entry, _ in labelled],
            rows=rows,
            read=[places[row] for row in read],
        )

    @property
    def targets(self) -> list[int]:
        """The token after each scored row."""
        return [
            token_id
            for entry in self.scored
            for token_id in entry.sequence.token_ids[entry.read.start + 1 : entry.read.stop + 1]
        ]

    @property
    def labels(self) -> list[tuple[int, ...]]:
        """Each labelled row's labels, padded to the longest by repetition."""
        labels = [entry.sequence.request.labels for entry in self.labelled]
        most = max(map(len, labels), default=0)
        return [(*own, *own[:1] * (most - len(own))) for own in labels]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Results of a step's reading, on their way to the host."""

    reading: PromptReading
    scores: Sequences[TokenScores]  # each of some rows
    pooled: Tensor | None  # (num_pooled, hidden_size) float32, the sum of each entry's rows
    labels: Sequences[Tensor]  # each of some rows, (num_rows, most_labels) float32 logits

    def join(self, sampled: Sequences[Sampled]) -> list[Sampled]:
        """Return the result of each entry, once the copies have arrived.

        Args:
            sampled: the sampling entries' results, in plan order.
        """
        found = iter(sampled)
        results: list[Sampled] = []
        places = []
        for entry in self.reading.entries:
            places.append(len(results))
            results += islice(found, entry.num_results) if entry.samples else (Sampled(),)
        read = {entry.sequence: part for entry, part in self._parts()}
        for place, entry in zip(places, self.reading.entries, strict=True):
            if entry.read and results[place].error is None:
                part = read[entry.sequence]
                results[place] = BROKEN if part is None else results[place]._replace(**part)
        return results

    def _parts(self) -> Iterator[tuple[ScheduledSequence, dict[str, Any] | None]]:
        yield from self._scores()
        sums = [] if self.pooled is None else self.pooled.tolist()
        for entry, values in zip(self.reading.pooled, sums, strict=True):
            yield entry, _pooled(values)
        rows = (row for labels in self.labels for row in labels.tolist())
        for entry, values in zip(self.reading.labelled, rows, strict=True):
            yield entry, _pooled(values[: len(entry.sequence.request.labels)])

    def _scores(self) -> Iterator[tuple[ScheduledSequence, dict[str, Any] | None]]:
        parts = [[tensor.tolist() for tensor in scores] for scores in self.scores]
        rows = (row for columns in parts for row in zip(*columns, strict=True))
        targets = iter(self.reading.targets)
        for entry in self.reading.scored:
            count = entry.sequence.request.sampling.prompt_logprobs
            told = []
            for _, token_id, (chosen, top, ids) in zip(entry.read, targets, rows, strict=False):
                pairs = zip(ids[:count], top[:count], strict=True)
                best = tuple([Candidate(*pair) for pair in pairs])
                told.append(TokenLogprobs(Candidate(token_id, chosen), best))
            is_sound = all(math.isfinite(one.chosen.logprob) for one in told)
            yield entry, {"scores": tuple(told)} if is_sound else None


def _pooled(values: list[float]) -> dict[str, Any] | None:
    is_sound = all(map(math.isfinite, values))
    return {"pooled": array("d", values)} if is_sound else None


class PromptReader:
    """Computes a prompt's results from its hidden states.

    Args:
        score_tokens: computes log probabilities of the next tokens.
    """

    def __init__(self, executor: Executor[Any], score_tokens: ScoreTokens, device: Device) -> None:
        self.executor = executor
        self._score_tokens = score_tokens
        self._device = device

    def launch(self, hidden: Tensor, reading: PromptReading) -> ReadRows:
        """Enqueue the computation.

        Args:
            hidden: (num_rows, hidden_size), of the reading's rows.
        """
        hidden = hidden.index_select(0, self._device.send(np.array(reading.read)))
        targets = reading.targets
        asked = [one.sequence.request.sampling.prompt_logprobs or 0 for one in reading.scored]
        scores = []
        if targets:
            parts = (hidden[: len(targets)], self._device.send(np.array(targets)))
            for rows, following in zip(*(part.split(LOGIT_ROWS) for part in parts), strict=True):
                scores.append(self._score(rows, following, max(asked)))
        sizes = [len(entry.read) for entry in reading.pooled]
        ends = list(accumulate(sizes, initial=len(targets)))
        sums = [arrays.sum_of_rows(hidden[first:last]) for first, last in pairwise(ends)]
        pooled = self._device.fetch(arrays.stack(sums)) if sums else None
        return ReadRows(reading, scores, pooled, self._label(hidden[ends[-1] :], reading.labels))

    def _label(self, hidden: Tensor, labels: list[tuple[int, ...]]) -> list[Tensor]:
        if not labels:
            return []
        parts = (hidden, self._device.send(np.array(labels)))
        return [
            self._device.fetch(self.executor.logits(rows).gather(1, wanted).float())
            for rows, wanted in zip(*(part.split(LOGIT_ROWS) for part in parts), strict=True)
        ]

    def _score(self, hidden: Tensor, targets: Tensor, most: int) -> TokenScores:
        scores = self._score_tokens(self.executor.logits(hidden), targets, most)
        return TokenScores(*map(self._device.fetch, scores))
