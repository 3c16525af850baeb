"""The script of a simulated engine, written before it starts: settings, arrivals, faults.

A script does not depend on what the engine does, so that parts can be left out to find the smallest
one that still fails.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.engine.plain_search import Found, best_answers
from support.simulation.simulated_pictures import Element, compiled, elements_of, picture, prompt_of
from support.simulation.virtual_model import EOS, STOPS, VOCAB, content_of, next_token, stop_pieces

from appliance.engine.nouns.limits import max_beam_tokens
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

SALTS = ("", "", "", "x")
OWNERS = ("", "ann", "bob", "agent")
FAULTS = ("memory", "launch", "collect", "nan", "death")
DISK_FAULTS = ("full", "slow", "damaged", "damaged", "damaged", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one engine."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int
    prefix_caching: bool
    sealed: bool
    depth: int
    host_blocks: int
    host_keeps_evicted: bool
    tokens_per_move: int
    disk_blocks: int
    searches: float  # share of requests that are beam searches
    admits_eagerly: bool  # admit whatever fits now, at the price of many preemptions
    recurrent: bool = False  # the model has a state
    checkpoints: int = 0  # rows for checkpoints of states
    first_distance: int = 512  # of `policy.chunk_end`
    drafts: float = 0.0  # share of right tokens among those proposed; 0 proposes none
    drafts_eagerly: bool = False  # also beside prompts
    pictures: bool = False  # requests have some

    @property
    def num_slots(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return min(self.context_length, self.num_slots + 1)


@dataclass(frozen=True, slots=True)
class Event:
    """An event before step `step`: a request arrives or leaves, a fault is set, or time passes."""

    step: int
    arrives: Request | None = None
    leaves: tuple[str, int | None] | None = None
    fault: str = ""
    disk_fault: str | None = None  # from now on
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """One engine's life."""

    setting: Setting
    events: tuple[Event, ...]
    noise: int


def answer_of(request: Request, index: int, max_tokens: int) -> list[int]:
    """The right answer of a choice, wherever its blocks are and whatever else runs."""
    sampling, last = request.sampling, 0
    for token in prompt_of(request):
        last = content_of(request.cache_salt, last, token)
    answer: list[int] = []
    length = len(request.prompt_token_ids)
    while True:
        token = next_token(last, index)
        answer.append(token)
        if ends(sampling, token, len(answer)) or length + len(answer) >= max_tokens:
            return answer
        last = content_of(request.cache_salt, last, token)


def beams_of(
    request: Request, setting: Setting, cuts: list[list[Found]] | None = None
) -> list[Found]:
    """The answers that a beam search must find, without any cache; none if it can never run.

    Args:
        request: the search.
        setting: the engine's settings, whose cache bounds the search.
        cuts: gets the answers if the time is over after one token, after two, and so on.
    """
    prompt, width = request.prompt_token_ids, request.sampling.num_sequences
    longest = max_beam_tokens(
        len(prompt),
        width,
        setting.block_size,
        setting.num_blocks,
        is_recurrent=setting.recurrent,
    )
    if width > setting.max_num_seqs or longest <= len(prompt):
        return []
    room = min(longest, setting.context_length) - len(prompt)
    return best_answers(request, min(room, request.sampling.max_tokens or room), cuts)


def ends(sampling: SamplingParams, token: int, num_tokens: int) -> bool:
    """Whether an answer of `num_tokens` tokens ends with its last one."""
    stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
    return num_tokens == sampling.max_tokens or (stops and num_tokens > sampling.min_tokens)


def write_script(rng: random.Random, num_steps: int, *, pictures: bool = False) -> Script:
    """Write a load that keeps an engine busy for about `num_steps` steps, at times overloaded."""
    setting = replace(_setting(rng), pictures=pictures)
    events: list[Event] = []
    told: list[Request] = []  # conversations so far, to be continued
    step = 0.0
    while step < num_steps:
        crowd = rng.choice([0.3, 0.8, 1.2, 3.0])  # load as a share of the engine's capacity
        until = step + rng.choice([20, 100, 300])
        while step < until:
            event = _happening(rng, setting, int(step), told)
            events.append(event)
            if event.arrives is not None:
                told.append(event.arrives)
                step += rng.expovariate(crowd / _steps_of(event.arrives, setting))
    return Script(setting, tuple(events), rng.randrange(2**32))


def _steps_of(request: Request, setting: Setting) -> float:
    """Estimate how many steps of the engine a request takes."""
    longest = setting.max_tokens - len(request.prompt_token_ids)
    answer = max(1, min(request.sampling.max_tokens or longest, longest, 40))
    rows = min(len(request.prompt_token_ids), 40) + request.sampling.num_sequences * answer
    fitting = setting.num_slots // (len(request.prompt_token_ids) + answer)
    at_once = max(1, min(setting.max_num_seqs, setting.max_num_batched_tokens, fitting))
    return max(
        rows / setting.max_num_batched_tokens, request.sampling.num_sequences * answer / at_once
    )


def _setting(rng: random.Random) -> Setting:
    block_size = rng.choice([1, 2, 2, 4, 4, 8, 16])
    max_num_seqs = rng.choice([1, 2, 3, 4, 6, 8])
    length = rng.choice([12, 24, 48, 80])  # the most tokens of one sequence
    slots = int(length * rng.choice([0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 3.0]))
    return Setting(
        num_blocks=max(2, -(-slots // block_size)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([1, 3, 8, 32, 64]),
        context_length=length,
        prefix_caching=rng.random() < 0.85,
        sealed=rng.random() < 0.3,
        depth=rng.choice([0, 0, 1, 1, 2]),  # with two or more there is no look-ahead
        host_blocks=rng.choice([0, 4, 20, 100, 100]),
        host_keeps_evicted=rng.random() < 0.5,
        tokens_per_move=rng.choice([1, 1, 1, 1000]),
        disk_blocks=rng.choice([0, 30, 1000]),
        searches=rng.choice([0.05, 0.05, 0.5, 0.9]),
        admits_eagerly=rng.random() < 0.8,
        recurrent=rng.random() < 0.5,
        checkpoints=rng.choice([0, 1, 3, 10, 30, 100]),
        first_distance=rng.choice([4, 16]),
        drafts=rng.choice([0.0, 0.3, 0.7, 0.9, 1.0]),
        drafts_eagerly=rng.random() < 0.8,
    )


def _happening(rng: random.Random, setting: Setting, step: int, told: list[Request]) -> Event:
    kind = rng.random()
    if kind < 0.03:
        return Event(step, fault=rng.choice(FAULTS))
    if kind < 0.12 and told:
        gone = rng.choice(told[-8:]).request_id
        return Event(step, leaves=(gone, rng.choice([None, None, 0, 1])))
    if kind < 0.135 and setting.disk_blocks:
        return Event(step, disk_fault=rng.choice(DISK_FAULTS))
    if kind < 0.145:
        return Event(step, seconds=rng.choice([0.5, 5.0, 50.0]))
    return Event(step, arrives=_request(rng, setting, str(len(told)), told))


def _request(rng: random.Random, setting: Setting, name: str, told: list[Request]) -> Request:
    salt = rng.choice(SALTS)
    own: list[Element] = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 12]))]
    if setting.pictures:
        for _ in range(rng.choice([0, 1, 1, 3])):
            place = rng.randrange(len(own) + 1)
            own[place:place] = picture(rng)
    begun: list[Element] = []
    kind = rng.random()
    if kind < 0.45 and told:  # a conversation's next turn, or its last one again, or a part of it
        last = rng.choice(told[-6:])
        salt = last.cache_salt if rng.random() < 0.9 else salt
        begun = elements_of(last)
        if rng.random() < 0.6 and len(begun) < setting.max_tokens:
            begun += answer_of(last, 0, setting.max_tokens)
        if rng.random() < 0.3:
            begun = begun[: rng.randrange(len(begun) + 1)]
    elif kind < 0.8:
        begun = [(i * i) % VOCAB for i in range(rng.randrange(20))]
    prompt = (begun + own)[: setting.max_tokens + 1]  # sometimes too long
    if rng.random() < 0.95:
        prompt = prompt[: setting.max_tokens - 2]
    ids, pictures = compiled(prompt)
    max_tokens = rng.choice([1, 2, 6, 12, 12, 20, 40, None])
    beams = rng.random() < setting.searches
    stop = rng.choice([(), *STOPS]) if beams else ()
    n = rng.choice([1, 1, 1, 1, 2, 4])
    best_of = rng.choice([None, None, None, None, None, n + rng.choice([0, 1, 2])])
    return Request(
        request_id=name,
        prompt_token_ids=ids,
        pictures=pictures,
        sampling=SamplingParams(
            n=rng.choice([1, 2]),
            best_of=rng.choice([2, 3, 4]),
            use_beam_search=True,
            length_penalty=rng.choice([0.0, 0.5, 1.0, 2.0, -1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            max_tokens=rng.choice([3, 8, 16, None]),
            min_tokens=rng.choice([0, 0, 1, 3]),
            stop=stop,
            ignore_eos=rng.random() < 0.5,
            seed=1,
        )
        if beams
        else SamplingParams(
            n=n,
            best_of=best_of,
            logprobs=None if best_of is None else 0,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 1 if max_tokens is None else min(2, max_tokens)]),
            stop_token_ids=rng.choice([(), (), (7,)]),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.0]),
            ignore_eos=rng.random() < 0.5,
            seed=1,
        ),
        stop_pieces=stop_pieces(stop),
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=salt,
        owner=rng.choice(OWNERS),
        timeout=rng.choice([None, None, 0.2, 1.0, 4.0, *([] if beams else [None] * 2)]),
        max_queue_seconds=rng.choice([None, None, None, 0.3, 3.0]),
    )
