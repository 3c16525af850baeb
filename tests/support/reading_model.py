"""A model that computes nothing but what it reads, and the answers that it should give.

A slot holds a hash of the slot before it and its token, and what may follow depends on every slot
that the block table leads to. So a wrong, stale or missing block changes the answers, and the
right ones are found by a search over plain lists.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from appliance.engine.messages import Candidate
from appliance.engine.plan import Continuations, Plan, ScheduledSequence
from appliance.engine.request import Request

if TYPE_CHECKING:
    from appliance.engine.sequence import Sequence

VOCAB = 13
EOS = 3
TEXTS = ["a", "b", "ab", "", "ab", "b", "a", "ab.", ".a", "b.", "ab", ".", "."]  # of each token
STOP = "ab"
BASE = [5, 7, 5, 8, 9, 5, 1, 1, 2, 6, 4, 0, 8, 8, 7, 1, 0, 5]  # prompts begin with a part of this


def content(previous: int, token: int) -> int:
    return hash((previous, token))


def ranking(contents: list[int]) -> list[tuple[float, int]]:
    """Score and token of all that may follow, the likeliest first."""
    shuffle = random.Random(hash(tuple(contents)))
    return sorted(((-shuffle.expovariate(0.5), token) for token in range(VOCAB)), reverse=True)


def allowed(
    request: Request, num_output_tokens: int, ranked: list[tuple[float, int]]
) -> list[tuple[float, int]]:
    """What a sampler lets through; with stop strings so little that sometimes all of it ends."""
    sampling = request.sampling
    if num_output_tokens < sampling.min_tokens:
        ranked = [(score, token) for score, token in ranked if token != EOS]
    return ranked[: sampling.num_sequences] if sampling.stop else ranked


def following(tokens: list[int]) -> list[tuple[float, int]]:
    contents = [0]
    for token in tokens:
        contents.append(content(contents[-1], token))
    return ranking(contents[1:])


def right_answers(request: Request, max_tokens: int) -> list[tuple[int, ...]]:
    """Beam search as it is written down, over whole lists of tokens."""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    width, finished = sampling.num_sequences, list[tuple[float, tuple[int, ...]]]()
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                (score + more, (*answer, token))
                for score, answer in beams
                for more, token in allowed(request, len(answer), following([*prompt, *answer]))
            ),
            reverse=True,
        )
        ended = [stops(request, answer) or length == max_tokens for _, answer in ranked]
        finished += [
            (score / length**sampling.length_penalty, answer)
            for (score, answer), ends in zip(ranked[:width], ended, strict=False)
            if ends
        ]
        finished = sorted(finished, reverse=True)[:width]
        beams = [one for one, ends in zip(ranked, ended, strict=True) if not ends][:width]
        if len(finished) == width:
            hopeful = sampling.early_stopping == "never" and sampling.length_penalty > 0
            longest = max_tokens if hopeful else length
            best = beams[0][0] / longest**sampling.length_penalty if beams else 0.0
            if not beams or sampling.early_stopping is True or best <= finished[-1][0]:
                break
    return [answer for _, answer in finished[: sampling.n]]


def stops(request: Request, answer: tuple[int, ...]) -> bool:
    text = "".join(TEXTS[token] for token in answer)
    return answer[-1] == EOS or any(stop in text for stop in request.sampling.stop)


def right_answer(request: Request, max_tokens: int) -> tuple[int, ...]:
    answer: list[int] = []
    while len(answer) < max_tokens and (not answer or answer[-1] != EOS):
        _, token = following([*request.prompt_token_ids, *answer])[0]
        answer.append(token)
    return tuple(answer)


class ReadingModel:
    """Runs plans on slots of integers; with sealed blocks, open ones are in pages of their own."""

    def __init__(self, block_size: int, shuffle: random.Random) -> None:
        self.block_size = block_size
        self.shuffle = shuffle
        self.slots: dict[tuple[int, int], int] = {}
        self.pages: dict[tuple[int, int], int] = {}

    def run(self, plan: Plan) -> dict[Sequence, Continuations]:
        size = self.block_size
        for copy in self.shuffle.sample(plan.copies, len(plan.copies)):
            for offset in range(size):
                self.slots[copy.destination, offset] = self.slots.get((copy.source, offset), -1)
                page = self.pages.get((copy.open_source, offset), -1)
                self.pages[copy.open_destination, offset] = page
        pages = plan.open_pages or (None,) * len(plan.scheduled)
        found = {}
        for entry, opened in self.shuffle.sample(
            list(zip(plan.scheduled, pages, strict=True)), len(plan.scheduled)
        ):
            contents = self.read(entry, opened)
            tokens = entry.sequence.token_ids
            assert len(tokens) >= entry.end or entry.follows
            for position in range(entry.start, entry.end):
                before = contents[-1] if contents else 0
                # Without a token the sequence has ended meanwhile: the row is for nothing.
                token = tokens[position] if position < len(tokens) else 0
                contents.append(content(before, token))
                self.write(entry, opened, position, contents[-1])
            request, length = entry.sequence.request, entry.sequence.num_output_tokens
            found[entry.sequence] = Continuations(
                tuple(
                    Candidate(token, score)
                    for score, token in allowed(request, length, ranking(contents))
                )
            )
        return found

    def read(self, entry: ScheduledSequence, opened: tuple[int, ...] | None) -> list[int]:
        size, table = self.block_size, entry.sequence.block_table
        own = entry.start // size * size
        sealed = entry.start if opened is None else own
        found = [self.slots[table[p // size], p % size] for p in range(sealed)]
        return found + [self.pages[opened[0], p % size] for p in range(own, entry.start) if opened]

    def write(
        self, entry: ScheduledSequence, opened: tuple[int, ...] | None, position: int, value: int
    ) -> None:
        size = self.block_size
        block, offset = entry.sequence.block_table[position // size], position % size
        if opened is None:
            self.slots[block, offset] = value
            return
        page = opened[position // size - entry.start // size]
        self.pages[page, offset] = value
        if offset + 1 == size:
            for at in range(size):
                self.slots[block, at] = self.pages[page, at]
