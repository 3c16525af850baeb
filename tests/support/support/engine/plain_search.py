"""Beam search by its definition, over whole lists of tokens: the answers that an engine owes.

Shares no code with the engine's search. Its model is the virtual one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.simulation.simulated_pictures import prompt_of
from support.simulation.virtual_model import EOS, TEXTS, VOCAB, content_of, ranking

from appliance.engine.nouns.request import FinishReason

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request

Found = tuple[tuple[int, ...], FinishReason]
Scored = tuple[float, tuple[int, ...], int]  # score, answer, content of the last slot


def best_answers(
    request: Request, longest: int, cuts: list[list[Found]] | None = None
) -> list[Found]:
    """The answers of a beam search, best first.

    Args:
        request: the search.
        longest: most tokens of an answer.
        cuts: gets the answers if the time is over after one token, after two, and so on.
    """
    sampling, width = request.sampling, request.sampling.num_sequences
    finished: list[tuple[float, Found]] = []
    last = 0
    for token in prompt_of(request):
        last = content_of(request.cache_salt, last, token)
    beams: list[Scored] = [(0.0, (), last)]
    for length in range(1, longest + 1):
        ranked = sorted((one for beam in beams for one in _grown(request, beam)), reverse=True)
        ended = [_stops(request, answer) for _, answer, _ in ranked]
        finished += [
            (
                score / length**sampling.length_penalty,
                (answer, FinishReason.STOP if ends else FinishReason.LENGTH),
            )
            for (score, answer, _), ends in zip(ranked[:width], ended, strict=False)
            if ends or length == longest
        ]
        finished = _best(finished, width)
        beams = [one for one, ends in zip(ranked, ended, strict=True) if not ends][:width]
        if length == longest or _is_over(request, beams, finished, longest):
            break
        if cuts is not None:
            cut = [
                (score / length**sampling.length_penalty, (answer, FinishReason.TIMEOUT))
                for score, answer, _ in beams
            ]
            best = _best([*finished, *cut], width)
            cuts.append([found for _, found in best[: sampling.n]])
    return [found for _, found in finished[: sampling.n]]


def _best(finished: list[tuple[float, Found]], width: int) -> list[tuple[float, Found]]:
    return sorted(finished, key=lambda one: -one[0])[:width]


def _is_over(
    request: Request, beams: list[Scored], finished: list[tuple[float, Found]], longest: int
) -> bool:
    """Whether no beam can improve on the finished answers."""
    sampling = request.sampling
    if not beams:
        return True
    if len(finished) < sampling.num_sequences:
        return False
    hopeful = sampling.early_stopping == "never" and sampling.length_penalty > 0
    length = longest if hopeful else len(beams[0][1])
    best = beams[0][0] / length**sampling.length_penalty
    return sampling.early_stopping is True or best <= finished[-1][0]


def _grown(request: Request, beam: Scored) -> list[Scored]:
    score, answer, last = beam
    salt, followers = request.cache_salt, ranking(last, request, len(answer), VOCAB)
    return [
        (score + logprob, (*answer, token), content_of(salt, last, token))
        for token, logprob in followers
    ]


def _stops(request: Request, answer: tuple[int, ...]) -> bool:
    sampling = request.sampling
    if answer[-1] in sampling.stop_token_ids or (answer[-1] == EOS and not sampling.ignore_eos):
        return True
    text = "".join(TEXTS[token] for token in answer)
    return any(stop in text for stop in sampling.stop)
