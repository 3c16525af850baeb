"""The thread pool: each chunk runs once, threads sleep and end, and there is no data race."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.runs.waiting import wait_until

from appliance.kernels.cpu.build import SOURCES, find_compiler
from appliance.kernels.cpu.engine import NativeEngine

PROGRAM = Path(__file__).with_name("pool_check.c")
TSAN = ("-fsanitize=thread", "-O1", "-g")
# Keeps libraries that another test preloads into this process out of the compiled program.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@contextmanager
def pool(library: ctypes.CDLL, threads: int) -> Iterator[NativeEngine]:
    engine = NativeEngine(library, threads)
    yield engine
    engine.close()


def exercise(engine: NativeEngine, runs: np.ndarray, count: int, nanoseconds: int) -> None:
    assert runs.dtype == np.int64
    engine.library.section_exercise(engine.handle, count, nanoseconds, runs.ctypes.data)


def check_sections(engine: NativeEngine, sections: int, seed: int) -> None:
    """Random sizes and lengths, with pauses in which workers sometimes fall asleep."""
    chance = random.Random(seed)
    runs, expected = np.zeros(100, np.int64), np.zeros(100, np.int64)
    for _ in range(sections):
        count = chance.randrange(100)
        nanoseconds = chance.choice((0, 0, 0, 100, 2000))
        exercise(engine, runs, count, nanoseconds)
        expected[:count] += 1
        if chance.random() < 0.01:
            time.sleep(chance.random() * 2e-4)
        if count % 10 == 0:
            assert (runs == expected).all()
    assert (runs == expected).all()


def thread_ids() -> set[str]:
    """The threads of this process; the system lists one for a moment after it has been joined."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("threads", range(1, 9))
def test_every_chunk_runs_once(loaded: ctypes.CDLL, threads: int) -> None:
    with pool(loaded, threads) as engine:
        check_sections(engine, 3000, seed=threads)


def test_more_chunks_than_one_round_holds(loaded: ctypes.CDLL) -> None:
    """A section's word has room for 2^20 chunks, less some for threads that come late."""
    runs = np.zeros(2**21 + 77, np.int64)
    with pool(loaded, 3) as engine:
        for count in (2**20 - 1, 2**20, 2**21 + 77):
            runs[:] = 0
            exercise(engine, runs, count, 0)
            assert (runs[:count] == 1).all()
            assert not runs[count:].any()


def test_engines_on_different_threads_do_not_meet(loaded: ctypes.CDLL) -> None:
    done = []

    def one(seed: int) -> None:
        with pool(loaded, 1 + seed % 3) as engine:
            check_sections(engine, 1000, seed)
            done.append(seed)

    callers = [threading.Thread(target=one, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(done) == list(range(6))


def test_an_engine_may_change_its_caller(loaded: ctypes.CDLL) -> None:
    with pool(loaded, 2) as engine:
        for seed in range(20):
            caller = threading.Thread(target=check_sections, args=(engine, 50, seed))
            caller.start()
            caller.join()


def test_engines_end_with_all_their_threads(loaded: ctypes.CDLL) -> None:
    before = thread_ids()  # threads of earlier tests may still end
    runs = np.zeros(8, np.int64)
    for number in range(200):
        with pool(loaded, 1 + number % 8) as engine:
            assert len(thread_ids() - before) >= number % 8
            for _ in range(number % 3):
                exercise(engine, runs, 8, 100)
        wait_until(lambda: thread_ids() <= before)


def test_idle_threads_use_no_cpu_time(loaded: ctypes.CDLL) -> None:
    runs = np.zeros(64, np.int64)
    with pool(loaded, 8) as engine:
        exercise(engine, runs, 64, 20_000)

        def rest() -> bool:
            begin = time.process_time()
            time.sleep(0.3)
            return time.process_time() - begin < 0.005

        wait_until(rest, "a third of a second without work")


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_senseless_numbers_of_threads_are_refused(loaded: ctypes.CDLL, threads: int) -> None:
    assert not loaded.ap_engine_create(threads, 0)


@pytest.mark.parametrize(
    ("flags", "checks"),
    [
        (("-O2",), ("sections", "limits", "one_core", "watch")),
        (TSAN, ("sections", "callers", "lifetimes", "parallel")),
        ((*TSAN, "-DAP_NO_FUTEX"), ("sections", "callers", "lifetimes", "parallel")),
    ],
    ids=["plain", "thread sanitizer", "thread sanitizer without futex"],
)
def test_the_pool_alone(tmp_path: Path, flags: tuple[str, ...], checks: tuple[str, ...]) -> None:
    program = tmp_path / "pool_check"
    options = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}")
    run([*find_compiler(), *flags, *options, SOURCES / "pool.c", PROGRAM, "-o", program])
    for check in checks:
        run([program, check])


def run(command: list[str | Path]) -> None:
    words = [str(word) for word in command]
    finished = subprocess.run(
        words,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, f"{shlex.join(words)}\n{finished.stdout}"
