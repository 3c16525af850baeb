"""Run measurements in processes; if one dies or hangs, only that measurement is lost.

An error on a GPU often makes it unusable for the whole process, and a kernel may never end. So the
measuring process reports what it begins and finds; if it dies, a new one skips that measurement.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol

START_AGAIN = 75  # exit code: all is reported, but this process cannot go on

Message = dict[str, Any]
Start = Literal["spawn", "forkserver"]


class Tell(Protocol):
    """Sends the supervisor `begin`, `row`, `end` or another message."""

    def __call__(self, **message: Any) -> None:
        """Send one message."""
        ...


# What a supervised process runs; takes `tell`, and the names of what is not measured again.
Work = Callable[[Tell, frozenset[str]], None]


def name_of(key: Mapping[str, Any]) -> str:
    """Return a string that equal keys share."""
    return json.dumps(key, sort_keys=True)


@dataclass
class Supervisor:
    """Runs a function in processes until it has measured everything.

    Args:
        work: measures; importable in a fresh process.
        take: gets every message but `begin` and `end`.
        done: names of keys; those that were begun and ended are added.
        patience: seconds without a message after which a measurement is given up.
        deadline: of all, in monotonic seconds.
        start: "spawn" is safe with CUDA whatever was imported; "forkserver" imports torch once.
    """

    work: Work
    take: Callable[[Message], None]
    done: set[str]
    patience: float
    deadline: float
    start: Start = "spawn"
    _begun: Message | None = field(default=None, init=False)

    def run(self) -> str:
        """Measure; return why it ended too early, or nothing."""
        while True:
            before = len(self.done)
            ended = self._run_once()
            if ended is not None:
                return ended
            if len(self.done) == before:
                return "its process ends before it has measured anything"

    def _run_once(self) -> str | None:
        """Run one process; return why to stop, or None if the rest needs another one."""
        ours, theirs = get_context("spawn").Pipe(duplex=False)
        process = begin_process(self.start, _supervised, theirs, sorted(self.done), self.work)
        theirs.close()
        self._begun = None
        try:
            while True:
                left = self.deadline - time.monotonic()
                if not ours.poll(max(0.0, min(self.patience, left))):
                    if left <= self.patience:
                        self._lose("the time of its suite was over")
                        return "the time is over"
                    self._lose(f"nothing was heard of it for {self.patience:.0f} s")
                    return None
                try:
                    message = json.loads(ours.recv_bytes())
                except (EOFError, OSError, ValueError):  # it died, perhaps within a message
                    process.join()
                    if process.exitcode not in (0, START_AGAIN):
                        self._lose(f"its process ended with code {process.exitcode}")
                    return "" if process.exitcode == 0 else None
                self._hear(message)
        finally:
            end_process(process)
            ours.close()

    def _hear(self, message: Message) -> None:
        if "begin" in message:
            self._begun = message["begin"]
        elif "end" in message:
            self.done.add(name_of(message["end"]))
        else:
            self.take(message)
            if "row" in message and self._begun is not None:
                self.done.add(name_of(self._begun))
                self._begun = None

    def _lose(self, why: str) -> None:
        if self._begun is not None:
            self.done.add(name_of(self._begun))
            self.take({"row": {"key": self._begun, "failed": why}})


def begin_process(start: Start, target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that ends with this one at the latest."""
    context = get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch", "triton", "appliance.engine.engine"])
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=target, args=arguments, daemon=True
    )
    process.start()
    return process


def end_process(process: BaseProcess) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):  # it leads no group yet, or no longer
        if process.pid is not None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _supervised(connection: Connection, done: list[str], work: Work) -> None:
    lead_a_group()

    def tell(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    work(tell, frozenset(done))


def lead_a_group() -> None:
    """Lead a process group, so that children end with it, and print to stderr."""
    os.setsid()
    os.dup2(2, 1)
