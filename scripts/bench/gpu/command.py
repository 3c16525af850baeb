"""Measure everything that needs a GPU into one folder; see scripts/bench/GPU.md.

    scripts/benchmark gpu --first --out results            # what the goals ask for, in nine minutes
    scripts/benchmark gpu --suite matmul --only w4a16 --no-peers --out results
    scripts/benchmark gpu --tiny --out /tmp/trial          # a trial, also without a GPU
    scripts/benchmark gpu --report results/h100-80gb-hbm3  # the tables again, and the roofline

Every kernel is checked before it is timed, and one whose result is wrong is not timed. Operands
are cold: sets of them take turns, together three times the second-level cache. Peers are measured
if they are installed. Each measurement is written as it is made; if one dies or hangs, only that
one is lost.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.gpu.plan import MINUTES, REAL_MODEL, SUITES, Amount, Wanted, suite_named

COMPILERS = 14  # at most; each has a CUDA context of its own


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [suite.name for suite in SUITES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--first", action="store_true", help="what the goals ask for")
    amount.add_argument("--tiny", action="store_true", help="small shapes; works without a GPU")
    parser.add_argument("--suite", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="as in the result")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="gets a folder for the device")
    parser.add_argument("--device", metavar="NAME", help="of that folder; else as torch says")
    parser.add_argument(
        "--minutes", type=float, default=None, help=f"for everything; {MINUTES:g} with --first"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the folder has already")
    parser.add_argument("--model", type=Path, help="real weights, for the suite real_model")
    parser.add_argument(
        "--packages", type=Path, metavar="FOLDER", help="wheels to be imported from"
    )
    parser.add_argument("--compilers", type=int, default=None, metavar="PROCESSES")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--commit", default="", help="where git does not say it")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the tables again")
    options = parser.parse_args(arguments)
    if options.report is None and options.out is None:
        parser.error("--out FOLDER says where the results go")
    return options


def main() -> None:
    options = parse()
    if options.report is not None:
        from bench.gpu import report

        print(report.write(options.report))
        report.draw(options.report)
        return
    from bench.gpu.run import Settings, packages_in, run

    if options.packages is not None:
        found = str(packages_in(options.packages))
        sys.path.append(found)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), found))
        )
    amount = Amount.TINY if options.tiny else Amount.FIRST if options.first else Amount.FULL
    suites = tuple(
        suite_named(name)
        for name in options.suite
        if name != REAL_MODEL or options.model is not None
    )
    cores = len(os.sched_getaffinity(0))
    settings = Settings(
        suites=suites,
        wanted=Wanted(amount, not options.no_peers, frozenset(options.only), options.model),
        out=options.out,
        device=options.device,
        minutes=options.minutes or (MINUTES if amount is not Amount.FULL else 24 * 60),
        resume=options.resume,
        compilers=options.compilers or (1 if options.tiny else max(1, min(COMPILERS, cores - 2))),
        replays=options.replays,
        commit=options.commit,
    )
    sys.exit(not run(settings))
