"""Time the stages of a start, and fail if one takes twice as long as it did.

    scripts/benchmark start
    scripts/benchmark start --sizes 0.1 0.5 4 12 --models FOLDER [--peer FOLDER]

The second form measures models of so many gigabytes instead, see `start_sizes.py`; the folder of
the peer has the package xllamacpp.

Measures each stage of `appliance serve` on the packaged default model, `appliance --help`, and the
memory of both processes once they are idle. Times are divided by a yardstick, so that the machine's
speed cancels: the time of five processes that import NumPy, in the same run, between the starts.
`BASE` holds each stage's earlier multiple of it; a stage beyond twice that plus the slack makes
this end with code 1.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from appliance.bench.figures import spread
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

APPLIANCE = (sys.executable, "-P", "-m", "appliance")
# Multiples of the yardstick, medians of five starts on a loaded machine. Of "command" and "weights"
# the old values, times 0.22 and 0.55: medians over seven pairs of starts by the code before and
# after a change, in alternation at a load of 15 to 20. (The whole start took 0.63, its processor
# time 0.79.)
BASE = {
    "help": 0.27,
    "command": 0.11,
    "imports": 1.39,
    "header and plan": 0.03,
    "weights": 0.67,
    "KV cache": 0.02,
    "server": 0.08,
}
SLACK = 0.1  # of the yardstick; the smallest stages take as long as a page fault or two


def yardstick() -> float:
    """Return the seconds of five processes that import NumPy, one after another."""
    begin = time.perf_counter()
    for _ in range(5):
        subprocess.run([sys.executable, "-P", "-c", "import numpy"], check=True)
    return time.perf_counter() - begin


def time_help() -> float:
    """Return the seconds of `appliance --help`."""
    begin = time.perf_counter()
    subprocess.run([*APPLIANCE, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def one_start(port: int) -> tuple[dict[str, float], dict[str, float]]:
    """Start the server once; return its stages in seconds and its memory in MB, idle."""
    command = [*APPLIANCE, "serve", "--port", str(port), "--kv-disk", "off"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(one for one in server.stderr if one.strip().startswith("started in"))
            time.sleep(1)
            memory = memory_of(psutil.Process(server.pid))
        finally:
            server.terminate()
            server.communicate()
    return read_stages(line), memory


def read_stages(line: str) -> dict[str, float]:
    """Read the banner's line about the start."""
    listed = line.partition(": ")[2]
    return {name: float(took) for name, took in re.findall(r"([A-Za-z][\w ]*?) ([\d.]+)", listed)}


def memory_of(server: psutil.Process) -> dict[str, float]:
    """Return the resident memory of the server's process and the engine's, in MB."""
    engine = server.children()[0]
    each = {"server": server.memory_info().rss, "engine": engine.memory_info().rss}
    return {name: round(size / 1e6, 1) for name, size in each.items()}


def slower(multiples: dict[str, float]) -> list[str]:
    """Describe the stages that take more than twice their base."""
    return [
        f"{name} takes {multiples[name]:.2f} times the yardstick; it was {base:.2f}"
        for name, base in BASE.items()
        if multiples[name] > 2 * base + SLACK
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    yards, stages, memories = [], [], []
    for _ in range(options.repeats):
        yards.append(yardstick())
        helped = time_help()
        found, memory = one_start(options.port)
        stages.append({"help": helped, **found})
        memories.append(memory)
    yard = statistics.median(yards)
    seconds = {name: [one[name] for one in stages] for name in stages[0]}
    return {
        "benchmark": "start",
        "conditions": conditions(),
        "yardstick_seconds": spread(yards),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "multiples": {
            name: round(statistics.median(values) / yard, 3) for name, values in seconds.items()
        },
        "idle_megabytes": memories[-1],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8092)
    parser.add_argument("--sizes", nargs="+", help="gigabytes of models")
    parser.add_argument("--models", type=Path, help="folder for their files, with space for twice")
    parser.add_argument("--peer", type=Path, help="folder that has the package xllamacpp")
    options = parser.parse_args()
    if options.sizes:
        from bench.server.start_sizes import measure

        shared = (options.models, options.peer, options.port, options.repeats)
        sizes = {size: measure(size, *shared) for size in options.sizes}
        write_result(
            options.out, {"benchmark": "start", "conditions": conditions(), "sizes": sizes}
        )
        return
    result = run(options)
    write_result(options.out, result)
    if late := slower(result["multiples"]):
        sys.exit("\n".join(["the start has become slower:", *late]))
