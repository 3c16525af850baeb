"""Measure what the disk tier of the KV cache saves after a restart, and costs decode steps.

    scripts/benchmark restart               # the packaged default model, prompts of 2,048 tokens
    scripts/benchmark restart --no-servers  # only the cost for decode steps

Times to the first token of the same long prompts: cold, from the cache in memory, after a restart
with the files in the system's page cache, and after another one without. Then decode steps: see
`step_cost`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from appliance.bench.figures import spread
from appliance.bench.load import Endpoint, completion_body, run_burst
from appliance.bench.metrics import read_metrics
from appliance.bench.own_server import ServerProcess
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.metrics import sum_of
from bench.server.step_cost import prompt_of, time_steps


async def first_tokens(endpoint: Endpoint, prompts: list[list[int]]) -> list[float]:
    """Measure milliseconds to the first token of each prompt, one after another."""
    found = []
    for tokens in prompts:
        burst = await run_burst(endpoint, [[completion_body(tokens, 4)]])
        found.append(1000 * burst.answers[0].first_token)
    return found


async def one_server(
    options: argparse.Namespace, folder: str, prompts: list[list[int]], times: int
) -> tuple[list[list[float]], dict[str, float]]:
    """Start a server, send the prompts some times over, and end it once all is written."""
    model = [options.model] if options.model else []
    with ServerProcess.ours(options.port, "--kv-disk", folder, *model) as server:
        endpoint = server.endpoint
        start = await server.healthy()
        await first_tokens(endpoint, [prompt_of(40, seed=-1)] * 2)  # warm-up
        found = [await first_tokens(endpoint, prompts) for _ in range(times)]
        for _ in range(300):
            samples = await read_metrics(endpoint)
            if not sum_of(samples, "appliance_kv_disk_pending"):
                break
            await asyncio.sleep(0.1)
        from_disk = sum_of(samples, "appliance_prefix_hit_tokens_total", {"tier": "disk"})
    return found, {"start_seconds": round(start, 2), "tokens_from_disk": from_disk}


def give_pages_up(folder: str) -> None:
    """Drop the files from the system's page cache."""
    for path in Path(folder).rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_restarts(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    prompts = [prompt_of(options.prompt_tokens, seed) for seed in range(options.repeats)]
    (cold, warm), first = asyncio.run(one_server(options, folder, prompts, times=2))
    (cached,), second = asyncio.run(one_server(options, folder, prompts, times=1))
    give_pages_up(folder)
    (read,), third = asyncio.run(one_server(options, folder, prompts, times=1))
    cases = {"cold": cold, "warm": warm, "restarted": cached, "restarted_pages_given_up": read}
    base = statistics.median(cold)
    sizes = [path.stat().st_size for path in Path(folder).rglob("*.kv")]
    return {
        "ttft_ms": {name: spread(values) for name, values in cases.items()},
        "share_of_cold": {
            name: round(statistics.median(values) / base, 3) for name, values in cases.items()
        },
        "servers": [first, second, third],
        "files": len(sizes),
        "megabytes": round(sum(sizes) / 1e6, 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=40, help="of windows, for each batch")
    parser.add_argument("--window", type=int, default=96, help="decode steps in one")
    parser.add_argument("--no-servers", action="store_true", help="only time decode steps")
    parser.add_argument("--no-steps", action="store_true", help="only time restarts")
    parser.add_argument("--folder", default=None, help="where the files go; default: a temporary")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "restart",
        "conditions": conditions(),
        "prompt_tokens": options.prompt_tokens,
        "threads": options.threads,
    }
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-kv-") as folder:
        if not options.no_servers:
            result["restart"] = time_restarts(options, f"{folder}/servers")
        if not options.no_steps:
            result["steps"] = time_steps(options, f"{folder}/steps")
    write_result(options.out, result)
