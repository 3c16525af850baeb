"""How much slower a step becomes when other processes keep cores busy.

    scripts/bench_contention                   # one busy process; synthetic steps and the engine
    scripts/bench_contention --busy 1 2 4 --no-engine

Two kinds of steps: 150 parallel sections of 20 us each on the CPU library's thread pool, and the
decode step of the engine with whatever kernels it chooses. They run alone and beside N processes
that compute, in turns, so that a drift of the machine meets both. What counts is the
ratio of medians. `same` and `other` say whether the busy processes share the scheduling group of
the benchmark, or have one of their own: Linux shares cores among groups first (sessions, control
groups), so that one process in another group is due as much as all threads of this one. With two
cores and one such process a step cannot be expected to have more than one core.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conditions import ROOT, conditions, percentile, spread, write_result

from appliance import LLM, SamplingParams
from appliance.engine.request import Request
from appliance.kernels.cpu.engine import NativeEngine, check
from appliance.kernels.cpu.library import load_library

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine

Step = Callable[[], float | None]  # seconds of one step; None for one that is not to be counted
OUT = ROOT / "benchmarks" / "results" / "cpu" / "contention.json"
QUIET_CORES = 0.25  # a turn is disturbed if other programs used more
ATTEMPTS = 4
SETTLE_SECONDS = 1.5  # at the start of a turn, not counted: the pool and the system adapt
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Turns:
    """All turns of one situation."""

    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # cores that other programs used, each turn

    def result(self) -> dict[str, Any]:
        """Milliseconds of steps, and how quiet the machine was."""
        shares = {"p10": 0.10, "median": 0.50, "p90": 0.90, "p99": 0.99}
        return {
            **{
                name: round(1000 * percentile(self.seconds, share), 3)
                for name, share in shares.items()
            },
            "mean": round(1000 * statistics.mean(self.seconds), 3),
            "steps": len(self.seconds),
            "cores_used_by_others": spread(self.others, 2),
        }


@contextmanager
def busy_processes(count: int, *, own_group: bool) -> Iterator[list[int]]:
    """Processes that compute until the end of the block; gives their ids."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    command = [sys.executable, "-c", loop]  # which ends when its parent does, however it does
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(
                subprocess.Popen(command, start_new_session=own_group, stdin=subprocess.DEVNULL)
            )
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_turn(step: Step, seconds: float, busy: list[int], turns: Turns) -> None:
    """Steps for a while; a turn that others disturb is done again, a few times at most."""
    tries: list[tuple[float, list[float]]] = []
    while len(tries) < ATTEMPTS and not (tries and tries[-1][0] < QUIET_CORES):
        settled = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < settled:
            step()
        begin, used, taken = time.perf_counter(), cpu_seconds_of_others(busy), []
        while time.perf_counter() < begin + seconds:
            taken.append(step())
        used = cpu_seconds_of_others(busy) - used
        others = max(0.0, used) / (time.perf_counter() - begin)
        tries.append((others, [one for one in taken if one is not None]))
    others, kept = min(tries)
    turns.others.append(others)
    turns.seconds += kept


def cpu_seconds_of_others(busy: list[int]) -> float:
    """CPU time of the machine so far, less that of this process and of the busy ones."""
    user, nice, system, _, _, irq, softirq = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    total = (user + nice + system + irq + softirq) / _TICKS - time.process_time()
    for pid in busy:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total -= (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def measure(step: Step, busy_counts: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Alone and beside each number of busy processes, in turns."""
    alone = Turns()
    beside = {(group, count): Turns() for group in ("same", "other") for count in busy_counts}
    for _ in range(rounds):
        run_turn(step, seconds, [], alone)
        for (group, count), turns in beside.items():
            with busy_processes(count, own_group=group == "other") as pids:
                run_turn(step, seconds, pids, turns)
    base = percentile(alone.seconds, 0.5)
    return {
        "alone_ms": alone.result(),
        "beside_busy_processes": [
            {
                "busy": count,
                "scheduling_group": group,
                "ratio_of_medians": round(percentile(turns.seconds, 0.5) / base, 2),
                "ratio_of_p99_to_median_alone": round(percentile(turns.seconds, 0.99) / base, 2),
                "ms": turns.result(),
            }
            for (group, count), turns in beside.items()
        ],
    }


def synthetic_step(threads: int, sections: int, microseconds: float, chunks: int) -> Step:
    """Sections that `threads` undisturbed threads finish in so many microseconds each."""
    engine = NativeEngine(load_library(), threads)
    nanoseconds = round(1000 * microseconds * threads / chunks)
    exercise = engine.library.ap_pool_exercise

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(sections):
            check(exercise(engine.handle, chunks, nanoseconds, None))
        return time.perf_counter() - begin

    return step


def decode_step(engine: LLMEngine, prompt_tokens: int, max_tokens: int) -> Step:
    """Steps of one sequence after the other; those that decode count."""
    chance = random.Random(1)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def step() -> float | None:
        if not engine.has_work:
            ids = tuple(
                chance.randrange(1000, engine.info.vocab_size) for _ in range(prompt_tokens)
            )
            engine.submit(
                Request(request_id=f"{chance.random()}", prompt_token_ids=ids, sampling=sampling)
            )
        begin = time.perf_counter()
        engine.step()
        taken = time.perf_counter() - begin
        stats = engine.stats()
        decodes = stats.step_decode_tokens == 1 and stats.step_prefill_tokens == 0
        return taken if decodes else None

    return step


def scheduling() -> dict[str, Any]:
    """What decides how the system shares its cores."""
    autogroup = Path("/proc/sys/kernel/sched_autogroup_enabled")
    priority = Path("/proc/self/autogroup")
    return {
        "kernel": os.uname().release,
        "autogroup": autogroup.is_file() and autogroup.read_text().strip() == "1",
        "autogroup_nice": priority.read_text().split()[-1] if priority.is_file() else None,
        "nice": os.nice(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[1], help="busy processes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sections", type=int, default=150)
    parser.add_argument("--section-us", type=float, default=20)
    parser.add_argument("--chunks", type=int, default=8, help="of a section")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-engine", action="store_true", help="synthetic steps only")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that busy processes end with this
    result: dict[str, Any] = {
        "benchmark": "contention",
        "conditions": {**conditions(), **scheduling()},
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds_per_turn": options.seconds,
    }
    shape = (options.sections, options.section_us, options.chunks)
    one_thread = Turns()
    run_turn(synthetic_step(1, shape[0], shape[1] * options.threads, shape[2]), 2, [], one_thread)
    result["synthetic"] = {
        "sections": shape[0],
        "microseconds_per_section": shape[1],
        "chunks_per_section": shape[2],
        "same_work_by_one_thread_alone_ms": one_thread.result(),
        **measure(
            synthetic_step(options.threads, *shape), options.busy, options.rounds, options.seconds
        ),
    }
    if not options.no_engine:
        engine = LLM(options.model, threads=options.threads).engine
        step = decode_step(engine, options.prompt_tokens, options.max_tokens)
        result["engine"] = {
            "backend": engine.info.backend,
            "model": engine.info.model,
            "weights": engine.info.weight_format,
            "kv": engine.info.kv_format,
            **measure(step, options.busy, options.rounds, options.seconds),
        }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
