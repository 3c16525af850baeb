"""Greedy answers of an engine, and of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine


def run(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for delta in engine.step().deltas:
            answers[int(delta.request_id)].extend(delta.token_ids)
    return answers


def by_transformers(model: Any, prompt: list[int], tokens: int) -> list[int]:
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer
