"""Looks at an engine process periodically, tells a hung one from a slow one, and ends it.

Looks find a process that is stopped, that has work and does nothing, or that computes without
progress. A long step is none of these: it computes and counts its progress (see `beacon`).
It counts looks instead of seconds, so a delay of the supervisor itself does not look like silence.
"""

from __future__ import annotations

import logging
from asyncio import sleep
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from appliance.long_lived import start_task

if TYPE_CHECKING:
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.process.child import EngineProcess
    from appliance.engine.process.supervisor import SupervisionLimits


LOOKS_TO_HANG = 8  # without signs of life from a process with work
LOOKS_TO_DOUBT = 2  # until it gets no new work
_AT_WORK = "RD"  # states of a thread that runs, or waits for a processor or disk
_STOPPED = "Tt"
logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one process at a time.

    Attributes:
        verdict: on the current or last process.
    """

    def __init__(self, limits: SupervisionLimits) -> None:
        self.verdict = Verdict.ALIVE
        self.responsive = True
        self._limits = limits
        self._heard = False

    def hear(self) -> None:
        """Take a message as a sign of life."""
        self._heard = True

    @contextmanager
    def over(
        self, process: EngineProcess, *, busy: Callable[[], bool], look: float
    ) -> Iterator[None]:
        """Watch a process.

        Args:
            look: seconds between looks.
        """
        self.verdict = Verdict.ALIVE
        task = start_task(partial(self._watch, process, busy, look), "engine-watchdog")
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self, process: EngineProcess, busy: Callable[[], bool], look: float) -> None:
        watch = Watch(patience=round(self._limits.step_timeout / self._limits.look))
        read = partial(read_signs, process.pid, process.beacon)
        while self.verdict in (Verdict.ALIVE, Verdict.DOUBTFUL):
            await sleep(look)
            heard, self._heard = self._heard, False
            before = self.verdict
            try:
                self.verdict = watch.look(heard=heard, busy=busy(), read=read)
            except Exception:
                logger.exception("looking at the engine process failed; the next look tries again")
                continue
            self.responsive = self.verdict is Verdict.ALIVE
            if self.verdict is not before:
                logger.warning("the engine process: %s", self.verdict.value)
        logger.error("the engine process %s: it is ended", self.verdict.value)
        try:
            process.dump_stacks()
            await sleep(min(1.0, look))
        finally:
            process.kill()


class Verdict(Enum):
    ALIVE = "alive"
    DOUBTFUL = "not responding"
    STOPPED = "was stopped"
    IDLE = "does nothing, with work to do"
    STUCK = "computes without getting anywhere"


class Signs(NamedTuple):
    """Observations of a process.

    Attributes:
        stopped: by a signal or a debugger.
        working: one of its threads, or its children's, runs or waits for a disk.
        waits_for_device: idle while a GPU computes.
    """

    stopped: bool = False
    working: bool = False
    progress: int = 0
    waits_for_device: bool = False


@dataclass(slots=True)
class Watch:
    """Judges one process over successive looks.

    Attributes:
        patience: looks without progress while it computes or waits for a device.
    """

    patience: int
    _progress: int = -1
    _stopped: int = 0  # in consecutive looks
    _idle: int = 0
    _quiet: int = 0

    def look(self, *, heard: bool, busy: bool, read: Callable[[bool], Signs]) -> Verdict:
        """Judge the process.

        Args:
            heard: it has reported since the last look.
            read: observes the process; True asks for all signs.
        """
        fine = heard or not busy
        signs = read(not fine)
        self._stopped = self._stopped + 1 if signs.stopped else 0
        if self._stopped >= LOOKS_TO_HANG:
            return Verdict.STOPPED
        moved = fine or signs.progress != self._progress
        self._progress = signs.progress
        self._quiet = 0 if moved else self._quiet + 1
        at_work = signs.stopped or signs.working or signs.waits_for_device
        self._idle = 0 if moved or at_work else self._idle + 1
        if self._idle >= LOOKS_TO_HANG:
            return Verdict.IDLE
        if self._quiet >= self.patience and not signs.stopped:
            return Verdict.STUCK
        doubtful = max(self._stopped, self._idle) >= LOOKS_TO_DOUBT
        return Verdict.DOUBTFUL if doubtful else Verdict.ALIVE


def read_signs(pid: int, beacon: Beacon, thorough: bool) -> Signs:
    """Observe a process; a dead one shows no signs.

    A thorough look at all threads and children takes some milliseconds.
    """
    signs = Signs(progress=beacon.progress, waits_for_device=beacon.waits_for_device)
    try:
        if _state(Path(f"/proc/{pid}/stat")) in _STOPPED:
            return signs._replace(stopped=True)
        working = thorough and (_works(pid) or any(map(_works, _children(pid))))
    except (OSError, psutil.Error):
        return signs
    return signs._replace(working=working)


def _works(pid: int) -> bool:
    return any(_state(task / "stat") in _AT_WORK for task in Path(f"/proc/{pid}/task").iterdir())


def _state(stat: Path) -> str:
    """Return the state after the last ")" of the name; X if the process ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
