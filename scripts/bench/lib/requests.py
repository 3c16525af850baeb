"""Requests of random tokens for an engine in this process."""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from bench.lib.prompts import random_tokens

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine

_names = count()


def submit(
    engine: LLMEngine, requests: int, prompt_tokens: int, max_tokens: int, seed: int = 0
) -> None:
    """Queue requests that are answered greedily and in full length."""
    chance = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(requests):
        ids = tuple(random_tokens(prompt_tokens, chance, engine.info.vocab_size))
        name = f"bench-{next(_names)}"
        engine.submit(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))
