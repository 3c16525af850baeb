"""Compare our server with other CPU servers under the same load, one after another.

    scripts/benchmark cpu_peers --peers-dir DIR
    scripts/benchmark cpu_peers --peers-dir DIR --only ours,llama-q4_0 --repeats 1 --out quick.json

`peer_servers.py` says where in DIR each server lies and how it starts; nothing is built or
installed, and absent servers are named. Every client streams greedy completions of a fixed length.
Prompts have an exact number of tokens and no first token in common, so that no prefix cache helps.
A repeat counts only if other programs used less than a quarter of a core in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.bench.bandwidth import HOW, probe
from appliance.bench.load import Endpoint, LoadError
from appliance.bench.own_server import ServerProcess
from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import ROOT, conditions
from bench.lib.prompts import ExactPrompts
from bench.server.peer_servers import Peer, Setting, all_peers
from bench.server.table import add_ratios, print_table
from bench.server.trial import Load, Trial


def measure(peer: Peer, setting: Setting, load: Load, tokenizer: Tokenizer) -> dict[str, Any]:
    """Start a server, measure it and stop it; a failure becomes `error`."""
    row: dict[str, Any] = {
        "name": peer.name,
        "weights": peer.weights,
        "command": peer.command,
        "environment": peer.environment,
        "load_average_before": round(os.getloadavg()[0], 2),
        "machine_before": probe([setting.threads])[0],
    }
    prompts = ExactPrompts(tokenizer)
    try:
        row["version"] = peer.version()
        endpoint = Endpoint("127.0.0.1", setting.port)
        with ServerProcess(peer.command, peer.environment, endpoint) as server:
            row |= asyncio.run(Trial(server, load, prompts, peer.body).run())
    except (LoadError, OSError, subprocess.CalledProcessError) as error:
        row["error"] = str(error)
        print(f"{peer.name}: {error}", file=sys.stderr)
    return row


def without_paths(result: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the result without the paths of this machine."""
    text = json.dumps(result)
    if setting.peers is not None:
        text = text.replace(str(setting.peers), "PEERS")
    text = text.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")
    cleaned: dict[str, Any] = json.loads(text)
    return cleaned


def terminate(*_: object) -> None:
    """End as after an error, so that no server stays behind."""
    raise SystemExit("terminated")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    folder = os.environ.get("PEERS_DIR")
    parser.add_argument(
        "--peers-dir", type=Path, default=folder, help="where other servers lie [PEERS_DIR]"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="these, in this order")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=numbers, default=Load().concurrency)
    parser.add_argument("--repeats", type=int, default=Load().repeats, help="that count")
    parser.add_argument("--attempts", type=int, default=Load().attempts, help="at most so many")
    parser.add_argument("--max-tokens", type=int, default=Load().max_tokens)
    parser.add_argument("--port", type=int, default=8089)
    parser.add_argument("serve_arguments", nargs="*", help="more for `appliance serve`, after --")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, terminate)
    load = Load(
        concurrency=options.concurrency,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        attempts=max(options.attempts, options.repeats),
    )
    setting = Setting(
        peers=options.peers_dir and options.peers_dir.absolute(),
        shipped=resolve_model("", cache_dir=cache_dir()).path,
        port=options.port,
        threads=options.threads,
        slots=max(options.concurrency),
        arguments=tuple(options.serve_arguments),
    )
    peers = {peer.name: peer for peer in all_peers(setting)}
    names = options.only.split(",") if options.only else list(peers)
    if unknown := set(names) - peers.keys():
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(peers)}")
    tokenizer = Tokenizer.from_path(setting.shipped)
    result: dict[str, Any] = {
        "benchmark": "cpu_peers",
        "conditions": conditions(),
        "threads": options.threads,
        "load": asdict(load),
        "prompts": "texts, the same for all servers, each with another first token",
        "bandwidth": {"how": HOW, "rows": probe(sorted({1, 2, options.threads}))},
        "absent": {},
        "servers": [],
    }
    for name in names:
        if missing := peers[name].missing():
            result["absent"][name] = [str(path) for path in missing]
            print(f"{name}: absent, there is no {missing[0]}", file=sys.stderr)
        else:
            print(f"{name}: measuring", file=sys.stderr)
            result["servers"].append(measure(peers[name], setting, load, tokenizer))
            add_ratios(result["servers"])
        write_result(options.out, without_paths(result, setting), quiet=True)
    print_table(result["servers"])
