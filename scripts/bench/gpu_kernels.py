"""Every GPU kernel: checked against float64, then timed beside its peers and the copy bandwidth.

    scripts/bench_kernels                          # everything, into benchmarks/results/DEVICE/
    scripts/bench_kernels --suite matmul --only w4a16 --no-peers
    scripts/bench_kernels --minutes 9 --compilers 12 --resume   # as much as that time allows
    scripts/bench_kernels --tiny                   # without a GPU, in Triton's interpreter: a trial
    scripts/bench_kernels --report RESULT.json     # the table, and the roofline picture beside it

A kernel whose check fails is not timed. Operands are cold: sets of them take turns, together three
times the second-level cache. Peers are measured if they are installed; none is installed here. The
result is written after every measurement; one that dies or hangs costs itself alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUITES = ("matmul", "attention", "layer_ops")
TINY_ENVIRONMENT = "TRITON_INTERPRET"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="as in the result")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes; works without a GPU")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--report", type=Path, default=None, metavar="RESULT.json")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="for everything")
    parser.add_argument("--patience", type=float, default=180, help="seconds for one measurement")
    parser.add_argument("--resume", action="store_true", help="keep what the result has already")
    parser.add_argument(
        "--compilers", type=int, default=0, metavar="PROCESSES", help="that compile ahead"
    )
    parser.add_argument("--worker", choices=SUITES, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--share", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """What the supervised process does: one suite, or a share of its kernels to be compiled."""
    from conditions import ROOT
    from gpu_rows import Rows
    from gpu_supervisor import tell, told
    from gpu_timing import Bench, device_facts

    if options.share is not None:
        index, count = map(int, options.share.split("/"))
        bench = Bench.to_compile()
        rows = Rows(bench, lambda **message: None, share=(index, count))
    else:
        done = told()
        bench = Bench.here(options.replays)
        tell(facts=device_facts(bench))
        rows = Rows(bench, tell, done)
    if not bench.is_gpu:  # bfloat16, which Triton's interpreter does not calculate with by itself
        sys.path.append(str(ROOT / "tests" / "kernels" / "executed" / "plugins"))
        importlib.import_module("interpreter_arithmetic")
    module = importlib.import_module(f"gpu_{options.worker}")
    module.measure(
        bench,
        rows,
        tiny=options.tiny,
        peers=not options.no_peers,
        only=frozenset(options.only),
    )


def run(options: argparse.Namespace) -> None:
    """Supervise one process after another, and write down what they say."""
    from conditions import ROOT, conditions, write_result
    from gpu_rows import add_ratios, key_of
    from gpu_supervisor import Message, Supervisor, name_of

    deadline = time.monotonic() + 60 * options.minutes
    environment = dict(os.environ)
    name = _gpu_name()
    if name is None and not options.tiny:
        sys.exit("there is no GPU here; --tiny tries the script in Triton's interpreter")
    if name is None:
        environment[TINY_ENVIRONMENT] = "1"
    folder = (name or "cpu").split()[-1].lower()
    out = options.out or ROOT / "benchmarks" / "results" / folder / "kernels.json"
    rows: list[dict[str, Any]] = []
    if options.resume and out.exists():
        rows = [row for row in json.loads(out.read_text())["rows"] if "failed" not in row]
    result: dict[str, Any] = {
        "benchmark": "gpu_kernels",
        "conditions": conditions(),
        "gpu": {},
        "tiny": options.tiny,
        "replays": options.replays if name else 1,
        "stopped": {},  # suites that did not come to their end, and why
        "rows": rows,
    }

    def take(message: Message) -> None:
        result["gpu"] = message.get("facts", result["gpu"])
        if "row" in message:
            rows.append(message["row"])
            add_ratios(rows)
            write_result(out, result, quiet=True)

    command = [sys.executable, *sys.argv]
    for suite in options.suite:
        worker = [*command, "--worker", suite]
        if options.compilers and name:
            _compile(worker, options.compilers, deadline)
        done = {name_of(key_of(row)) for row in rows}
        why = Supervisor(worker, environment, take, done, options.patience, deadline).run()
        if why:
            result["stopped"][suite] = why
        write_result(out, result, quiet=True)
    failed = [row for row in rows if row["who"] == "ours" and "failed" in row]
    for suite, why in result["stopped"].items():
        print(f"{suite} is not complete: {why}", file=sys.stderr)
    print(f"{len(rows)} measurements, {len(failed)} of ours failed; {out}", file=sys.stderr)
    sys.exit(bool(failed or result["stopped"]))


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _compile(worker: list[str], processes: int, deadline: float) -> None:
    """Have a suite's kernels compiled, all at once, for as long as half of the time that is left.

    What fails here is told when it is measured.
    """
    begin = time.monotonic()
    compilers = [
        subprocess.Popen(
            [*worker, "--share", f"{index}/{processes}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in range(processes)
    ]
    end = begin + (deadline - begin) / 2
    for compiler in compilers:
        try:
            compiler.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            compiler.kill()
            compiler.wait()
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def main() -> None:
    options = parse()
    if options.report is not None:
        import gpu_report

        gpu_report.write(options.report)
    elif options.worker is not None:
        work(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
