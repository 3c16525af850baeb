"""Measures an endpoint's throughput and latency at several numbers of streams.

Each stream sends distinct prompts, one after another, with a fixed answer length, so every server
does the same work.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.bench.figures import spread
from appliance.bench.load import Burst, Endpoint, completion_body, latency, run_burst

WORDS = [
    "river", "stone", "market", "letter", "garden", "winter", "signal", "harbor", "engine",
    "window", "captain", "forest", "bridge", "silver", "morning", "question", "village",
    "hammer", "teacher", "mountain", "copper", "shadow", "kitchen", "orange", "paper",
]  # fmt: skip
_PREFILL_WORDS = 350


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The load.

    Attributes:
        streams: numbers of concurrent clients, measured in turn.
        repeats: bursts at each number.
        prompt_words: per prompt; no two share a beginning.
        max_tokens: exact length of each answer.
    """

    streams: tuple[int, ...] = (1, 8)
    repeats: int = 3
    prompt_words: int = 56
    max_tokens: int = 128


async def measure(
    endpoint: Endpoint,
    model: str,
    shape: LoadShape,
    context_length: int | None = None,
    on_level: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Run all bursts.

    Args:
        model: its id in the API.
        context_length: tokens; long prompts stay below it.
        on_level: called with a description of the next measurement.

    Returns:
        `levels`, a dict for each number of streams; and `prefill` of a long prompt alone.

    Raises:
        LoadError: an answer is an error or has the wrong number of tokens.
    """
    seed = secrets.randbelow(2**40)  # so that an earlier run's prefix cache does not help

    async def burst(clients: int, words: int, max_tokens: int) -> Burst:
        nonlocal seed
        prompts = [prompt_of(words, 0, seed := seed + 1) for _ in range(clients)]
        bodies = [[completion_body(prompt, max_tokens, model)] for prompt in prompts]
        return await run_burst(endpoint, bodies)

    on_level("warming up")
    await burst(max(shape.streams), shape.prompt_words, 8)
    levels = []
    for streams in shape.streams:
        on_level(f"{streams} at once")
        bursts = [
            await burst(streams, shape.prompt_words, shape.max_tokens) for _ in range(shape.repeats)
        ]
        levels.append(_level(streams, bursts))
    on_level("a long prompt")
    words = min(_PREFILL_WORDS, (context_length or 4 * _PREFILL_WORDS) // 4)
    long = [(await burst(1, words, 2)).answers[0] for _ in range(shape.repeats)]
    prefill = {
        "prompt_tokens": round(sum(one.prompt_tokens for one in long) / len(long)),
        "tokens_per_second": spread([one.prompt_tokens / one.first_token for one in long]),
        "first_token_ms": latency([one.first_token for one in long]),
    }
    return {"levels": levels, "prefill": prefill}


def _level(streams: int, bursts: list[Burst]) -> dict[str, Any]:
    answers = [answer for burst in bursts for answer in burst.answers]
    return {
        "streams": streams,
        "prompt_tokens_mean": round(sum(a.prompt_tokens for a in answers) / len(answers), 1),
        "output_tokens_per_second": spread([burst.rate for burst in bursts]),
        "decode_tokens_per_second_each": spread(
            [(a.completion_tokens - 1) / max(a.total - a.first_token, 1e-6) for a in answers]
        ),
        "first_token_ms": latency([a.first_token for a in answers]),
        "between_tokens_ms": latency([gap for a in answers for gap in a.gaps]),
        "client_cores": spread([burst.cpu_seconds / burst.seconds for burst in bursts], 3),
    }


def prompt_of(words: int, shared_words: int, seed: int) -> str:
    """Return a prompt with a shared beginning, like a system prompt."""
    shared = random.Random(0).choices(WORDS, k=shared_words)
    return " ".join(shared + random.Random(seed + 1).choices(WORDS, k=words))
