"""Load an OpenAI-compatible endpoint at rising concurrency and report what clients feel.

Each client sends streamed completions of distinct prompts, one after another, `ignore_eos` and a
fixed answer length, so that every server does the same work. Works against any such endpoint;
where /metrics has our gauges, KV utilisation and the prefix-cache hit rate are reported too.

    scripts/bench_serving --start                       # starts `appliance serve` and stops it
    scripts/bench_serving --url http://127.0.0.1:8000   # a server that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from conditions import ROOT, conditions, percentile, spread, write_result

WORDS = [
    *("river", "stone", "market", "letter", "garden", "winter", "signal", "harbor", "engine"),
    *("window", "captain", "forest", "bridge", "silver", "morning", "question", "village"),
    *("hammer", "teacher", "mountain", "copper", "shadow", "kitchen", "orange", "paper"),
]


@dataclass
class Answer:
    """One request as its client saw it, in seconds."""

    first_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0


async def complete(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    begin = last = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"error in the stream: {chunk['error']}")
            if chunk.get("usage"):
                answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
                answer.completion_tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"] and not chunk["choices"][0].get("finish_reason"):
                if answer.first_token:
                    answer.gaps.append(now - last)
                else:
                    answer.first_token = now - begin
                last = now
    answer.total = time.perf_counter() - begin
    if answer.completion_tokens != max_tokens:
        raise SystemExit(f"asked for {max_tokens} tokens, got {answer.completion_tokens}")
    return answer


def prompt_of(words: int, shared_words: int, seed: int) -> str:
    """A prompt of its own behind a beginning that all share, as a system prompt would be."""
    shared = random.Random(0).choices(WORDS, k=shared_words)
    return " ".join(shared + random.Random(seed + 1).choices(WORDS, k=words))


async def watch(client: httpx.AsyncClient, samples: list[float]) -> None:
    """Sample KV utilisation while requests run."""
    while True:
        gauges = await read_gauges(client)
        if gauges.get("vllm:num_requests_running") and "appliance_kv_utilization" in gauges:
            samples.append(gauges["appliance_kv_utilization"])
        await asyncio.sleep(0.25)


async def read_gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Values of /metrics by name, labels left out; empty where there is no such page."""
    response = await client.get("/metrics")
    rows = re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", response.text, re.M)
    return {name: float(value) for name, value in rows}


async def run_level(
    client: httpx.AsyncClient, model: str, concurrency: int, options: argparse.Namespace, salt: int
) -> tuple[float, list[Answer]]:
    """One burst: every client at once, `--requests` each. Returns wall seconds and answers."""

    async def one_client(number: int) -> list[Answer]:
        return [
            await complete(
                client,
                model,
                prompt_of(
                    options.prompt_words,
                    options.shared_words,
                    salt * 10_000 + number * 100 + i,
                ),
                options.max_tokens,
            )
            for i in range(options.requests)
        ]

    begin = time.perf_counter()
    groups = await asyncio.gather(*(one_client(number) for number in range(concurrency)))
    return time.perf_counter() - begin, [answer for group in groups for answer in group]


async def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=600, limits=limits
    ) as client:
        model = options.model or (await client.get("/v1/models")).json()["data"][0]["id"]
        await run_level(client, model, 1, options, salt=999)  # warm-up
        rows = []
        for concurrency in options.concurrency:
            rates, answers, utilization = [], [], []
            watcher = asyncio.create_task(watch(client, utilization))
            for repeat in range(options.repeats):
                salt = options.seed + concurrency * 100 + repeat
                seconds, group = await run_level(client, model, concurrency, options, salt)
                rates.append(sum(a.completion_tokens for a in group) / seconds)
                answers += group
            watcher.cancel()
            rows.append(
                {
                    "concurrency": concurrency,
                    "prompt_tokens_mean": round(
                        sum(a.prompt_tokens for a in answers) / len(answers), 1
                    ),
                    "output_tokens_per_second": spread(rates),
                    "ttft_ms": latency([a.first_token for a in answers]),
                    "inter_token_ms": latency([gap for a in answers for gap in a.gaps]),
                    "kv_utilization_mean": round(sum(utilization) / len(utilization), 4)
                    if utilization
                    else None,
                }
            )
        gauges = await read_gauges(client)
        if queries := gauges.get("vllm:prefix_cache_queries_total"):
            rate = gauges["vllm:prefix_cache_hits_total"] / queries
            rows.append({"prefix_cache_hit_rate": round(rate, 4)})
        return rows


def latency(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(1000 * percentile(seconds, 0.50), 1),
        "p99": round(1000 * percentile(seconds, 0.99), 1),
    }


def start_server(options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], float]:
    """Start `appliance serve` and wait for /health; returns the process and the seconds it took."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "appliance", "serve", "--port", str(options.port)]
    server = subprocess.Popen([*command, *options.serve_arguments], cwd=ROOT)
    while time.perf_counter() - begin < 300:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if httpx.get(f"{options.url}/health", timeout=1).status_code == 200:
                return server, time.perf_counter() - begin
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    server.kill()
    raise SystemExit("the server was not healthy after 300 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
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
    parser.add_argument("--output", type=Path, default=None, help="also write the JSON here")
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
    server = None
    try:
        if options.start:
            server, seconds = start_server(options)
            result["start_to_healthy_seconds"] = round(seconds, 2)
        result["sweep"] = asyncio.run(sweep(options))
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    write_result(options.output, result)


if __name__ == "__main__":
    main()
