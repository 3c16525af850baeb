"""Drafts that are copied from a sequence's own text and from earlier answers."""

from __future__ import annotations

import random

import pytest

from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.speculation.suffix import (
    BYTES_PER_TOKEN,
    MAX_MATCH,
    SEPARATOR,
    WINDOWS,
    Corpus,
    SuffixProposer,
    TokenIndex,
    ends_of,
)

MOST = 6


def sequence(prompt: list[int], answer: list[int] | None = None, salt: str = "") -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    return Sequence(request, token_ids=[*prompt, *(answer or [])])


def longest(tokens: list[int], context: list[int]) -> int:
    """Length of the longest suffix of a context that occurs in `tokens` with a token after it."""
    return max(
        (
            next(
                (n for n in range(len(context)) if n > end or tokens[end - n] != context[-1 - n]),
                len(context),
            )
            for end in range(len(tokens) - 1)
        ),
        default=0,
    )


@pytest.mark.parametrize("chunks", [[1], [2, 7], [400], [3, 150, 1]])
def test_what_is_found_was_there(chunks: list[int]) -> None:
    noise = random.Random(len(chunks))
    index, tokens = TokenIndex(), list[int]()
    found = long = missed = 0
    while len(tokens) < 900:
        begin = noise.randrange(len(tokens) + 1)
        added = [*tokens[begin : begin + 12], noise.randrange(5)]
        for chunk in noise.choices(chunks, k=3):
            index.extend(added[:chunk])
            tokens += added[:chunk]
        context = tokens[-MAX_MATCH:]
        length, following = index.find(context, ends_of(context), MOST)
        if not length:
            continue
        found += 1
        assert length >= WINDOWS[-1]
        match = [*context[-length:], *following]
        places = range(len(tokens) - len(match) + 1)
        assert any(tokens[at : at + len(match)] == match for at in places)
        best = longest(tokens, context)
        assert length <= best
        long += best >= WINDOWS[0]
        missed += length < WINDOWS[0] <= best
    assert found > 3
    assert missed <= long / 10, "a few collide"


def test_a_text_of_one_kind_of_token_is_found_in_either_way_of_reading() -> None:
    at_once, slowly = TokenIndex(), TokenIndex()
    tokens = [7] * 300
    at_once.extend(tokens)
    for token in tokens:
        slowly.extend([token])
    context = tokens[-MAX_MATCH:]
    assert (
        at_once.find(context, ends_of(context), 1)
        == slowly.find(context, ends_of(context), 1)
        == (MAX_MATCH, (7,))
    )
    assert at_once.tables == slowly.tables


def test_no_match_leads_from_one_text_into_another() -> None:
    index = TokenIndex()
    index.extend([1, 2, 3, 4, SEPARATOR, 5, 6, 7, 8, SEPARATOR])
    assert index.find([1, 2, 3], ends_of([1, 2, 3]), MOST) == (3, (4,))
    assert index.find([2, 3, 4], ends_of([2, 3, 4]), MOST) == (3, ())
    assert index.find([3, 4, 5], ends_of([3, 4, 5]), MOST) == (0, ())


def test_an_answer_that_copies_its_prompt_is_proposed_from_there() -> None:
    prompt = list(range(10, 60))
    proposer = SuffixProposer()
    one = sequence(prompt, [20, 21, 22])
    ((found, proposal),) = proposer.propose([(one, 4)]).items()
    assert (found, proposal.token_ids, proposal.support) == (one, (23, 24, 25, 26), 3)
    one.token_ids += [23, 24, 99]
    assert proposer.propose([(one, 4)]) == {}, "nothing followed 24 and 99"


def test_earlier_answers_are_found_with_their_salt_alone() -> None:
    proposer = SuffixProposer()
    proposer.end(sequence([1, 2], list(range(100, 130)), salt="ann"))
    for salt, expected in (("ann", (113, 114)), ("", None), ("bob", None)):
        one = sequence([5, 6], [110, 111, 112], salt=salt)
        proposal = proposer.propose([(one, 2)]).get(one)
        assert (None if proposal is None else proposal.token_ids) == expected


def test_its_memory_is_bounded() -> None:
    corpus = Corpus(salt_tokens=400, all_tokens=1000)
    for number in range(40):
        corpus.add(f"salt {number % 5}", [number] * 90)
        assert corpus.num_tokens <= 1000
    corpus.add("salt 1", list(range(5000)))
    assert corpus.find("salt 1", [4990, 4991, 4992], ends_of([4990, 4991, 4992]), 2) == (
        3,
        (4993, 4994),
    ), "the last are kept"
    assert corpus.num_tokens <= 1000
    proposer = SuffixProposer(history_tokens=45)
    first, second = sequence([1, 2, 3] * 15), sequence([4, 5, 6] * 15)
    assert list(proposer.propose([(first, 2), (second, 2)])) == [first]
    proposer.end(first)
    assert list(proposer.propose([(second, 2)])) == [second], "there is room again"
    index = TokenIndex()
    index.extend([1] * 5000)
    size = 4 * len(index) + sum(4 * len(table) for table in index.tables)
    assert size <= BYTES_PER_TOKEN * len(index)
