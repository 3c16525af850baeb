"""Count what the prefix cache serves of two growing, interleaved agent conversations.

Each turn sends the whole conversation again with the assistant's replies, and appends a tool's
output of a fixed length. All that the turn before sent and received could come from the cache; the
server reports how many tokens did. Each turn brings equally much new text, but its time to the
first token includes attention over the growing conversation.

    scripts/benchmark agent  # a cache with room to spare, then one that just fits
    scripts/benchmark agent -- --kv-cache-dtype int8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import httpx

from appliance.bench.load import Endpoint, LoadError, read_metrics
from appliance.bench.own_server import ServerProcess
from appliance.bench.serving import WORDS
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

SYSTEM = (
    "You are a coding agent. You read the output of tools and say in one or two sentences what to "
    "do next. Never invent output. Answer shortly, name files and line numbers where you can, and "
    "stop when the task is done."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's tokens as the server counts them, and its time."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_ms: float
    finish_reason: str


def tool_output(words: int, seed: int) -> str:
    """Return lines as a compiler or a search would print them."""
    chosen = random.Random(seed)
    lines = []
    while words > 0:
        count = min(words, chosen.randint(4, 9))
        place = f"src/{chosen.choice(WORDS)}.py:{chosen.randint(1, 400)}:"
        lines.append(f"{place} {' '.join(chosen.choices(WORDS, k=count))}")
        words -= count
    return "```\n" + "\n".join(lines) + "\n```"


async def ask(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], max_tokens: int
) -> tuple[str, Turn]:
    """Send one turn; return the reply and its cost."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, first, reason = "", 0.0, ""
    usage: dict[str, Any] = {}
    begin = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise LoadError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.perf_counter() - begin
                text += piece
                reason = choice.get("finish_reason") or reason
    turn = Turn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        first_token_ms=round(1000 * first, 1),
        finish_reason=reason,
    )
    return text, turn


async def converse(url: str, options: argparse.Namespace) -> list[list[Turn]]:
    """Hold the two conversations in turns."""
    turns: list[list[Turn]] = [[], []]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        talks: list[list[dict[str, str]]] = [[{"role": "system", "content": SYSTEM}] for _ in "ab"]
        for number in range(options.turns):
            for who, messages in enumerate(talks):
                output = tool_output(options.words, options.seed + 1000 * who + number)
                messages.append({"role": "user", "content": f"Output of the tool:\n{output}"})
                reply, turn = await ask(client, model, messages, options.max_tokens)
                messages.append({"role": "assistant", "content": reply})
                turns[who].append(turn)
    return turns


def summary(turns: list[list[Turn]]) -> dict[str, Any]:
    """Return the share that came from the cache, and the last turn's time to the first token."""
    pairs = [pair for talk in turns for pair in pairwise(talk)]
    seen = sum(before.prompt_tokens + before.completion_tokens for before, _ in pairs)
    cached = sum(turn.cached_tokens for _, turn in pairs)
    first = {
        number: sum(talk[number - 1].first_token_ms for talk in turns) / len(turns)
        for number in (2, len(turns[0]))
    }
    return {
        "tokens_seen_before": seen,
        "of_these_from_the_cache": cached,
        "share": round(cached / seen, 4),
        "most_missed_in_a_turn": max(
            before.prompt_tokens + before.completion_tokens - turn.cached_tokens
            for before, turn in pairs
        ),
        "tokens_at_the_end": [
            talk[-1].prompt_tokens + talk[-1].completion_tokens for talk in turns
        ],
        "new_tokens_a_turn": [
            round((talk[-1].prompt_tokens - talk[1].cached_tokens) / (len(talk) - 1))
            for talk in turns
        ],
        "first_token_ms": {f"turn {number}": round(ms, 1) for number, ms in first.items()},
        "first_token_ratio": round(first[len(turns[0])] / first[2], 3),
    }


async def cache_size(endpoint: Endpoint) -> int:
    """Return how many tokens the KV cache holds."""
    for sample in await read_metrics(endpoint):
        if sample.name == "vllm:cache_config_info":
            return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    raise LoadError("/metrics does not tell the size of the cache")


def run(options: argparse.Namespace, memory: int, context: int | None = None) -> dict[str, Any]:
    """Start a server with so much KV cache and hold both conversations."""
    limit = [] if context is None else ["--max-model-len", str(context)]
    cache = ["--kv-cache-memory", str(memory)]
    with ServerProcess.ours(options.port, *cache, *options.serve_arguments, *limit) as server:
        asyncio.run(server.healthy())
        tokens = asyncio.run(cache_size(server.endpoint))
        turns = asyncio.run(converse(f"http://127.0.0.1:{options.port}", options))
    return {
        "kv_cache_bytes": memory,
        "kv_cache_tokens": tokens,
        **summary(turns),
        "turns": [[asdict(turn) for turn in talk] for talk in turns],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=60, help="of a tool's output")
    parser.add_argument("--max-tokens", type=int, default=32, help="of a reply")
    parser.add_argument("--memory", type=int, default=2**30, help="bytes of the roomy cache")
    parser.add_argument("--spare", type=float, default=0.03, help="what the tight cache has over")
    parser.add_argument("--port", type=int, default=8097)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve_arguments", nargs="*", help="after --")
    options = parser.parse_args()
    load = {name: getattr(options, name) for name in ("turns", "words", "max_tokens", "seed")}
    result: dict[str, Any] = {"benchmark": "agent", "conditions": conditions(), "load": load}
    roomy = run(options, options.memory)
    needed = sum(roomy["tokens_at_the_end"]) * (1 + options.spare)
    memory = int(needed * options.memory / roomy["kv_cache_tokens"])
    tight = run(options, memory, context=max(roomy["tokens_at_the_end"]) + 64)
    result["serve_arguments"] = options.serve_arguments
    result["roomy"], result["tight"] = roomy, tight
    write_result(options.out, result)
