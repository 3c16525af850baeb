"""Measure throughput and latency of an OpenAI-compatible endpoint at rising concurrency.

Each client streams completions of distinct prompts, one after another, with `ignore_eos` and a
fixed length, so that every server does the same work. Where /metrics has our gauges, the result
includes KV utilization and the prefix-cache hit rate.

    scripts/benchmark serving --start                      # starts `appliance serve` and stops it
    scripts/benchmark serving --url http://127.0.0.1:8000  # a server that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import ExitStack
from typing import Any

from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions, spread
from bench.lib.load import Burst, Endpoint, completion_body, fetch, latency, run_burst
from bench.lib.metrics import read_metrics, sum_of
from bench.lib.processes import Server
from bench.lib.prompts import prompt_of


async def watch(endpoint: Endpoint, samples: list[float]) -> None:
    """Sample KV utilisation while requests run."""
    while True:
        metrics = await read_metrics(endpoint)
        if sum_of(metrics, "vllm:num_requests_running"):
            samples += [one.value for one in metrics if one.name == "appliance_kv_utilization"]
        await asyncio.sleep(0.25)


async def run_level(
    endpoint: Endpoint, model: str, concurrency: int, options: argparse.Namespace, salt: int
) -> Burst:
    """Run all clients at once, `--requests` each."""

    def request(client: int, number: int) -> dict[str, Any]:
        seed = salt * 10_000 + client * 100 + number
        prompt = prompt_of(options.prompt_words, options.shared_words, seed)
        return completion_body(prompt, options.max_tokens, model)

    clients = [[request(c, i) for i in range(options.requests)] for c in range(concurrency)]
    return await run_burst(endpoint, clients)


async def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    endpoint = Endpoint.of_url(options.url, options.api_key)
    model = options.model or await first_model(endpoint)
    await run_level(endpoint, model, 1, options, salt=999)  # warm-up
    rows = []
    for concurrency in options.concurrency:
        bursts: list[Burst] = []
        utilization: list[float] = []
        watcher = asyncio.create_task(watch(endpoint, utilization))
        for repeat in range(options.repeats):
            salt = options.seed + concurrency * 100 + repeat
            bursts.append(await run_level(endpoint, model, concurrency, options, salt))
        watcher.cancel()
        answers = [answer for burst in bursts for answer in burst.answers]
        prompt_tokens = sum(answer.prompt_tokens for answer in answers)
        rows.append(
            {
                "concurrency": concurrency,
                "prompt_tokens_mean": round(prompt_tokens / len(answers), 1),
                "output_tokens_per_second": spread([burst.rate for burst in bursts]),
                "ttft_ms": latency([a.first_token for a in answers]),
                "inter_token_ms": latency([gap for a in answers for gap in a.gaps]),
                "client_cores": spread([b.cpu_seconds / b.seconds for b in bursts], 3),
                "kv_utilization_mean": round(sum(utilization) / len(utilization), 4)
                if utilization
                else None,
            }
        )
    metrics = await read_metrics(endpoint)
    if queries := sum_of(metrics, "vllm:prefix_cache_queries_total"):
        rate = sum_of(metrics, "vllm:prefix_cache_hits_total") / queries
        rows.append({"prefix_cache_hit_rate": round(rate, 4)})
    return rows


async def first_model(endpoint: Endpoint) -> str:
    _, page = await fetch(endpoint, "/v1/models")
    name: str = json.loads(page)["data"][0]["id"]
    return name


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default=None, help="endpoint, without /v1")
    parser.add_argument("--start", action="store_true", help="start `appliance serve` for this run")
    parser.add_argument("--port", type=int, default=8089, help="with --start")
    parser.add_argument("--model", default=None, help="default: the first of /v1/models")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=1, help="requests per client and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-words", type=int, default=56)
    parser.add_argument("--shared-words", type=int, default=0, help="common beginning, in words")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="change it to miss a warm prefix cache")
    parser.add_argument("serve_arguments", nargs="*", help="with --start, after --")
    options = parser.parse_args()
    options.url = options.url or f"http://127.0.0.1:{options.port}"
    result: dict[str, Any] = {"benchmark": "serving", "conditions": conditions()}
    result["load"] = {
        name: getattr(options, name)
        for name in (
            *("url", "requests", "repeats", "prompt_words", "shared_words", "max_tokens"),
            "serve_arguments",
        )
    }
    with ExitStack() as stack:
        if options.start:
            server = stack.enter_context(Server.ours(options.port, *options.serve_arguments))
            seconds = asyncio.run(server.healthy())
            result["start_to_healthy_seconds"] = round(seconds, 2)
        result["sweep"] = asyncio.run(sweep(options))
    write_result(options.out, result)
