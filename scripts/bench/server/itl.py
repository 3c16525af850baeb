"""Measure gaps between tokens of running streams beside a long prompt and without it.

    scripts/benchmark itl                              # 16 streams, a prompt of the full context
    scripts/benchmark itl --streams 4 --prompt-tokens 2048
    scripts/benchmark itl --url http://127.0.0.1:8000  # a server that runs already

In each round the streams decode for a while before the prompt arrives, and go on after its first
token. Gaps that end between its arrival and its first token are compared with the others of the
same round, so that drift of the machine affects both. Prompts are random tokens, so no cache helps.
The prompt's time to the first token is also measured on the idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from itertools import accumulate
from typing import Any

from appliance.bench.figures import percentile, spread
from appliance.bench.load import (
    Endpoint,
    LoadError,
    TimedAnswer,
    completion_body,
    fetch,
    latency,
    run_burst,
)
from appliance.bench.own_server import ServerProcess
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.processes import Meter
from bench.lib.prompts import random_tokens

STREAM_PROMPT = 64  # tokens


def request(tokens: int, max_tokens: int, chance: random.Random) -> dict[str, Any]:
    """Return the body of a streamed completion of random tokens."""
    return completion_body(random_tokens(tokens, chance), max_tokens)


async def one(endpoint: Endpoint, body: dict[str, Any]) -> TimedAnswer:
    """Send a single request."""
    (answer,) = (await run_burst(endpoint, [[body]])).answers
    return answer


async def run_round(
    endpoint: Endpoint, options: argparse.Namespace, chance: random.Random
) -> dict[str, Any]:
    """Send the long prompt in the middle of running streams, then alone."""
    bodies = [[request(STREAM_PROMPT, options.max_tokens, chance)] for _ in range(options.streams)]
    async with asyncio.TaskGroup() as group:
        streams = group.create_task(run_burst(endpoint, bodies))
        await asyncio.sleep(options.seconds_before)
        long = await one(endpoint, request(options.prompt_tokens, 1, chance))
    arrival, first = long.begin, long.begin + long.first_token
    beside: list[float] = []
    without: list[float] = []
    for answer in streams.result().answers:
        moments = accumulate(answer.gaps, initial=answer.begin + answer.first_token)
        next(moments)
        for gap, moment in zip(answer.gaps, moments, strict=True):
            (beside if arrival < moment <= first else without).append(gap)
        if moment < first:
            raise LoadError("the streams ended before the prompt was read; give more --max-tokens")
    alone = await one(endpoint, request(options.prompt_tokens, 1, chance))
    return {
        "beside": beside,
        "without": without,
        "ratio_p50": percentile(beside, 0.5) / percentile(without, 0.5),
        "ratio_p99": percentile(beside, 0.99) / percentile(without, 0.99),
        "first_token_seconds": long.first_token,
        "first_token_seconds_alone": alone.first_token,
    }


async def measure(endpoint: Endpoint, options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, after a short one that is not counted."""
    _, page = await fetch(endpoint, "/v1/models")
    context = json.loads(page)["data"][0]["max_model_len"]
    options.prompt_tokens = min(options.prompt_tokens or context - 1, context - 1)
    chance = random.Random(options.seed)
    await one(endpoint, request(min(512, context // 2), 32, chance))
    rounds = [await run_round(endpoint, options, chance) for _ in range(options.rounds)]

    def over_rounds(name: str, digits: int = 2) -> dict[str, float]:
        return spread([one[name] for one in rounds], digits)

    return {
        "context": context,
        "prompt_tokens": options.prompt_tokens,
        "streams": options.streams,
        "rounds": options.rounds,
        "ratio_of_p99": over_rounds("ratio_p99"),
        "ratio_of_p50": over_rounds("ratio_p50"),
        "gap_ms_without_prompt": latency([gap for one in rounds for gap in one["without"]]),
        "gap_ms_beside_prompt": latency([gap for one in rounds for gap in one["beside"]]),
        "prompt_first_token_seconds": over_rounds("first_token_seconds"),
        "prompt_first_token_seconds_alone": over_rounds("first_token_seconds_alone"),
        "prompt_first_token_ratio": round(
            sum(one["first_token_seconds"] for one in rounds)
            / sum(one["first_token_seconds_alone"] for one in rounds),
            2,
        ),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--url", help="default: start `appliance serve`, and stop it")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="", help="to start; default: the packaged one")
    parser.add_argument("--port", type=int, default=8097, help="of the server that is started")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, help="default: the full context")
    parser.add_argument("--max-tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--seconds-before", type=float, default=6, help="until the prompt arrives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this
    if options.url:
        endpoint = Endpoint.of_url(options.url, options.api_key)
        result = asyncio.run(measure(endpoint, options))
    else:
        model = [options.model] if options.model else []
        room = ["--kv-cache-memory", "2GiB"]  # so that nobody is preempted
        with ServerProcess.ours(options.port, *model, *room) as server:
            asyncio.run(server.healthy())
            meter = Meter(server)
            result = asyncio.run(measure(server.endpoint, options))
            result["cores_used"] = meter.read()
    write_result(options.out, {"benchmark": "itl", "conditions": conditions(), **result})
