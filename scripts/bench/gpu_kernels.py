"""Every GPU kernel: checked against float64, then timed beside its peers and the copy bandwidth.

    scripts/bench_kernels                          # everything, into benchmarks/results/DEVICE/
    scripts/bench_kernels --suite matmul --only w4a16 --no-peers
    scripts/bench_kernels --tiny                   # without a GPU, in Triton's interpreter: a trial
    scripts/bench_kernels --report RESULT.json     # the table, and the roofline picture beside it

A kernel whose check fails is not timed. Operands are cold: sets of them take turns, together three
times the second-level cache. Peers are measured if they are installed; none is installed here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
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
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    from conditions import ROOT, conditions, write_result
    from gpu_rows import Rows
    from gpu_timing import Bench, device_facts

    bench = Bench.here(options.replays)
    if not bench.is_gpu and not options.tiny:
        sys.exit("there is no GPU here; --tiny tries the script in Triton's interpreter")
    if not bench.is_gpu:  # bfloat16, which Triton's interpreter does not calculate with by itself
        sys.path.append(str(ROOT / "tests" / "kernels" / "executed" / "plugins"))
        importlib.import_module("interpreter_arithmetic")
    rows = Rows(bench)
    facts = device_facts(bench)
    result: dict[str, Any] = {
        "benchmark": "gpu_kernels",
        "conditions": conditions(),
        "gpu": facts,
        "tiny": options.tiny,
        "replays": bench.replays,
        "rows": rows.found,
    }
    folder = str(facts.get("name", "cpu")).split()[-1].lower()
    out = options.out or ROOT / "benchmarks" / "results" / folder / "kernels.json"
    for suite in options.suite:
        module = importlib.import_module(f"gpu_{suite}")
        module.measure(
            bench,
            rows,
            tiny=options.tiny,
            peers=not options.no_peers,
            only=frozenset(options.only),
        )
        rows.add_ratios()
        write_result(out, result, quiet=True)  # what there is, should a later suite be cut off
    failed = [row for row in rows.found if row["who"] == "ours" and "failed" in row]
    print(f"{len(rows.found)} measurements, {len(failed)} of ours failed; {out}", file=sys.stderr)
    sys.exit(bool(failed))


def main() -> None:
    options = parse()
    if options.report is not None:
        import gpu_report

        gpu_report.write(options.report)
        return
    if options.tiny and os.environ.get(TINY_ENVIRONMENT) != "1":
        import torch

        if not torch.cuda.is_available():  # triton reads this when it is imported
            environment = {**os.environ, TINY_ENVIRONMENT: "1"}
            os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    run(options)


if __name__ == "__main__":
    main()
