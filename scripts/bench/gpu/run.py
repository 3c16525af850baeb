"""Run the suites one after another, each in its own processes, and keep their results."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import report, worker
from bench.gpu.plan import COMPILE_SECONDS, Amount, Suite, Wanted, deadlines
from bench.gpu.results import Results, folder_name
from bench.gpu.supervisor import Message, Start, Supervisor, begin_process, end_process
from bench.lib.conditions import conditions

FACTS_SECONDS = 90.0  # for the first look at the device


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        suites: which, in this order.
        wanted: what each is told.
        out: the folder that gets a folder for the device.
        device: that folder's name; None takes what torch calls the device.
        minutes: for everything.
        resume: whether results that are there are kept and not measured again.
        compilers: processes that compile kernels ahead.
        replays: of each captured graph.
        commit: of the code, where git does not say it.
    """

    suites: tuple[Suite, ...]
    wanted: Wanted
    out: Path
    device: str | None
    minutes: float
    resume: bool
    compilers: int
    replays: int
    commit: str = ""


def run(settings: Settings) -> bool:
    """Measure everything; return whether all suites ended and nothing of ours failed.

    Raises:
        SystemExit: the folder holds results that would be mixed up with these.
    """
    begin = time.monotonic()
    end = begin + 60 * settings.minutes
    amount = settings.wanted.amount
    # A trial forks from a process that has imported torch, which starts quickly; with CUDA only a
    # fresh process is safe.
    start: Start = "forkserver" if amount is Amount.TINY else "spawn"
    gpu = device_facts()
    if gpu["device"] == "cpu":
        if amount is not Amount.TINY:
            sys.exit("there is no GPU here; --tiny tries the scripts in Triton's interpreter")
        os.environ["TRITON_INTERPRET"] = "1"
    results = _open(settings, gpu.get("name", "cpu"))
    state = conditions()
    state["commit"] = settings.commit or state["commit"]
    results.add({"run": {**state, "gpu": gpu, "amount": amount.value, "minutes": settings.minutes}})
    compiled = [suite for suite in settings.suites if suite.compiles]
    seconds = [COMPILE_SECONDS if compiled else 0.0, *(suite.seconds for suite in settings.suites)]
    now = time.monotonic()
    limits = [now + limit for limit in deadlines(seconds, end - now)]
    if compiled:
        compile_ahead(compiled, settings, start, limits[0])
    for suite, limit in zip(settings.suites, limits[1:], strict=True):
        _run_suite(suite, settings, start, limit, results)
        table = report.write(results.path.parent)
    print(table, file=sys.stderr)
    print(f"{time.monotonic() - begin:.0f} s; {results.path.parent}", file=sys.stderr)
    incomplete = [suite for suite in settings.suites if results.ends[suite.name]["end"]]
    failed = [
        row for row in results.rows.values() if "failed" in row and row["key"].get("who") == "ours"
    ]
    return not incomplete and not failed


def compile_ahead(suites: list[Suite], settings: Settings, start: Start, deadline: float) -> None:
    """Compile kernels in parallel; measuring reports what fails here."""
    begin = time.monotonic()
    count = settings.compilers
    # A trial runs only a small part: nothing is compiled for Triton's interpreter.
    parts = count * 32 if settings.wanted.amount is Amount.TINY else count
    processes = [
        begin_process(start, worker.compile_share, suites, settings.wanted, index, parts)
        for index in range(count)
    ]
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        end_process(process)
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _run_suite(
    suite: Suite, settings: Settings, start: Start, deadline: float, results: Results
) -> None:
    begin = time.monotonic()
    print(f"-- {suite.name}: {suite.about}", file=sys.stderr)

    def take(message: Message) -> None:
        if "row" in message:
            results.add({"suite": suite.name, **message["row"]})

    work = partial(worker.measure, suite, settings.wanted, settings.replays)
    done = results.done(suite.name)
    why = Supervisor(work, take, done, suite.patience, deadline, start).run()
    seconds = round(time.monotonic() - begin, 1)
    results.add({"suite": suite.name, "end": why, "seconds": seconds})
    print(f"-- {suite.name}: {seconds} s {why}", file=sys.stderr)


def device_facts() -> dict[str, Any]:
    """Return the device's facts."""
    rows: list[dict[str, Any]] = []

    def take(message: Message) -> None:
        rows.append(message["row"])

    deadline = time.monotonic() + FACTS_SECONDS
    why = Supervisor(worker.facts, take, set(), FACTS_SECONDS, deadline).run()
    if why or not rows:
        sys.exit(f"the device cannot be looked at: {why}")
    return {name: value for name, value in rows[0].items() if name != "key"}


def _open(settings: Settings, device: str) -> Results:
    folder = settings.out / (settings.device or folder_name(device))
    results = Results.read(folder)
    if results.runs and not settings.resume:
        sys.exit(f"{folder} holds results; --resume adds to them, --device NAME takes another one")
    before = {run["gpu"].get("name", "cpu") for run in results.runs}
    if before - {device}:
        sys.exit(f"{folder} holds results of {', '.join(before)}, and this is {device}")
    return results


def packages_in(folder: Path) -> Path:
    """Unpack a folder's wheels, or return the folder itself if it has none."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return folder
    unpacked = Path(tempfile.mkdtemp(prefix="packages-"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    return unpacked
