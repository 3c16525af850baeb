"""Distinguishes a hung engine from a slow one.

Periodic looks find a process that is stopped, that has work and does nothing, or that computes
without progress. A long step is none of these: it computes and counts its progress (see `beacon`).
It counts looks instead of seconds, so a delay of the supervisor itself does not look like silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from appliance.engine.nouns.beacon import Beacon

LOOKS_TO_HANG = 8  # without signs of life from a process with work
LOOKS_TO_DOUBT = 2  # until it gets no new work
_AT_WORK = "RD"  # states of a thread that runs, or waits for a processor or disk
_STOPPED = "Tt"


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


class Verdict(Enum):
    ALIVE = "alive"
    DOUBTFUL = "not responding"
    STOPPED = "was stopped"
    IDLE = "does nothing, with work to do"
    STUCK = "computes without getting anywhere"


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
