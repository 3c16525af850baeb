"""Measure what Ray costs: first tokens and throughput through a cluster's front, and without it.

One replica on a local Ray cluster answers through HAProxy and the front, and at its own address;
`appliance serve` with the same settings stands beside it. Bursts of each follow in turns, so that
drift of the machine affects all. Goals: a first token at most 10 ms later, and at most 5 % less
throughput than without Ray.

    scripts/benchmark cluster_cost --out scripts/bench/results/cluster_cost.json
"""

from __future__ import annotations

import asyncio
import random
import statistics
from operator import sub, truediv
from typing import TYPE_CHECKING, Any

from ray_cluster import KEY, RayCluster, ray_cluster_running

from appliance.bench.figures import spread
from appliance.bench.load import Endpoint, LoadError, completion_body, run_burst
from appliance.bench.own_server import ServerProcess
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.prompts import random_tokens

if TYPE_CHECKING:
    import argparse

PLAIN, DIRECT, CLUSTER = "appliance serve", "the replica itself", "through the front"
PROMPT = 64  # tokens


def serve_on(cluster: RayCluster, options: argparse.Namespace) -> str:
    """Serve one replica; return the address of its own server."""
    words = [options.model] * bool(options.model)
    words += ["--replicas", "1", "--port", str(cluster.port), *settings(options)]
    done = cluster.run("serve", *words)
    if done.returncode:
        raise LoadError(done.stderr)
    (replica,) = cluster.replicas()
    url: str = replica["url"]
    return url


def settings(options: argparse.Namespace) -> list[str]:
    return ["--device", "cpu", "--threads", str(options.threads), "--kv-disk", "off"]


async def time_round(
    endpoints: dict[str, Endpoint], options: argparse.Namespace, chance: random.Random
) -> dict[str, dict[str, float]]:
    """Return each way's median time to the first token, alone, and tokens a second of a burst."""
    ways = list(endpoints.items())
    chance.shuffle(ways)
    found = {}
    for name, endpoint in ways:
        firsts = []
        for _ in range(options.singles):
            body = completion_body(random_tokens(PROMPT, chance), 8)
            (answer,) = (await run_burst(endpoint, [[body]])).answers
            firsts.append(answer.first_token)
        bodies = [
            [completion_body(random_tokens(PROMPT, chance), options.max_tokens)]
            for _ in range(options.streams)
        ]
        burst = await run_burst(endpoint, bodies)
        found[name] = {
            "first_token_ms": 1e3 * statistics.median(firsts),
            "tokens_per_second": options.streams * options.max_tokens / burst.seconds,
        }
    return found


async def run(options: argparse.Namespace, plain: ServerProcess, cluster: RayCluster) -> Any:
    await plain.healthy()
    host, port = serve_on(cluster, options).removeprefix("http://").split(":")
    endpoints = {
        PLAIN: plain.endpoint,
        DIRECT: Endpoint(host, int(port), api_key=KEY),
        CLUSTER: Endpoint("127.0.0.1", cluster.port, api_key=KEY),
    }
    chance = random.Random(0)
    await time_round(endpoints, options, chance)  # warms up
    return [await time_round(endpoints, options, chance) for _ in range(options.rounds)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--singles", type=int, default=10, help="requests alone, in each round")
    parser.add_argument("--streams", type=int, default=8, help="of a burst")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer in a burst")
    parser.add_argument("--port", type=int, default=8095, help="of appliance serve")
    options = parser.parse_args()
    words = [*([options.model] * bool(options.model)), *settings(options)]
    with ray_cluster_running() as cluster, ServerProcess.ours(options.port, *words) as plain:
        rounds = asyncio.run(run(options, plain, cluster))
        cluster.run("stop")
    ways = {
        name: {key: spread([one[name][key] for one in rounds]) for key in rounds[0][name]}
        for name in (PLAIN, DIRECT, CLUSTER)
    }
    later, share = (
        {
            name: [compare(one[CLUSTER][key], one[name][key]) for one in rounds]
            for name in (PLAIN, DIRECT)
        }
        for key, compare in (
            ("first_token_ms", sub),
            ("tokens_per_second", truediv),
        )
    )
    result = {
        "benchmark": "cluster_cost",
        "conditions": conditions(),
        "load": {name: getattr(options, name) for name in ("threads", "singles", "streams")}
        | {"prompt_tokens": PROMPT, "max_tokens": options.max_tokens, "rounds": options.rounds},
        "ways": ways,
        "first_token_later_ms": {name: spread(values) for name, values in later.items()},
        "throughput_share": {name: spread(values, 3) for name, values in share.items()},
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
