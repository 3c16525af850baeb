"""Measurements in a process of their own: where it dies or hangs, one of them is lost and no other.

An error on a GPU often ends the use of it for the whole process, and a kernel may never end. So
the process that measures says what it begins and what it found, a line of JSON each, and is started
again without what was lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

MARK = "\x1e"  # before a line that is meant for the supervisor
START_AGAIN = 75  # exit code: all is told, but this process is of no use any more

Message = dict[str, Any]


def tell(**message: Any) -> None:
    """Say something to the supervisor: `begin`, `row` or anything else."""
    print(MARK + json.dumps(message), flush=True)


def told() -> frozenset[str]:
    """What the supervisor says at the start: the names of what is not to be measured again."""
    return frozenset(json.load(sys.stdin))


def name_of(key: Mapping[str, Any]) -> str:
    """The same for equal keys."""
    return json.dumps(key, sort_keys=True)


@dataclass
class Supervisor:
    """Runs a command until it has measured everything.

    Args:
        command: of the process that measures.
        environment: its variables.
        take: gets every message but `begin`.
        done: names of keys; those that were begun and ended are added.
        patience: seconds without a message after which a measurement is given up.
        deadline: of all, in monotonic seconds.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    take: Callable[[Message], None]
    done: set[str]
    patience: float
    deadline: float

    def run(self) -> str:
        """Why it ended too early; empty if nothing is left to measure."""
        while True:
            before = len(self.done)
            ended = self._run_once()
            if ended is not None:
                return ended
            if len(self.done) == before:
                return "its process ends before it has measured anything"

    def _run_once(self) -> str | None:
        """Why it is over, or None if the rest needs another process."""
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(self.environment),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        lines: SimpleQueue[str | None] = SimpleQueue()
        pump = Thread(target=_pump, args=(process.stdout, lines), daemon=True)
        pump.start()
        begun: Message | None = None
        try:
            # One that is dead already shows below.
            with suppress(BrokenPipeError), process.stdin as stream:
                stream.write(json.dumps(sorted(self.done)))
            while True:
                left = self.deadline - time.monotonic()
                try:
                    line = lines.get(timeout=max(0.0, min(self.patience, left)))
                except Empty:
                    if left <= self.patience:
                        return "the time is over"
                    self._lose(begun, f"nothing was heard of it for {self.patience:.0f} s")
                    return None
                if line is None:
                    code = process.wait()
                    if code not in (0, START_AGAIN):
                        self._lose(begun, f"its process ended with code {code}")
                    return "" if code == 0 else None
                if not line.startswith(MARK):
                    sys.stderr.write(line)
                    continue
                message = json.loads(line.removeprefix(MARK))
                if "begin" in message:
                    begun = message["begin"]
                    continue
                self.take(message)
                if "row" in message and begun is not None:
                    self.done.add(name_of(begun))
                    begun = None
        finally:
            process.kill()
            process.wait()
            pump.join(timeout=5.0)  # what the process itself started may live on

    def _lose(self, begun: Message | None, why: str) -> None:
        if begun is not None:
            self.done.add(name_of(begun))
            self.take({"row": {**begun, "failed": why}})


def _pump(stream: IO[str], lines: SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
