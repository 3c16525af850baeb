"""Tells an engine that hangs from one that takes its time.

Looked at from outside once in a while: a process that was stopped, one that has work and does
nothing, and one that is busy without getting anywhere. A long step is none of these: it computes,
and counts how far it is (see `beacon`). Looks are counted, not seconds, so that a supervisor that
was held up itself takes nothing for silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from appliance.engine.beacon import Beacon

LOOKS_TO_HANG = 8  # without a sign of life, of a process that has work
LOOKS_TO_DOUBT = 2  # until it is not given new work
_AT_WORK = "RD"  # states of a thread that runs, or waits for a processor or a disk
_STOPPED = "Tt"


class Signs(NamedTuple):
    """What a process is doing.

    Attributes:
        stopped: by a signal or a debugger.
        working: a thread of it, or of a process that it started, runs or waits for a disk.
        progress: of its beacon.
        waits_for_device: it does nothing because a GPU does something.
    """

    stopped: bool = False
    working: bool = False
    progress: int = 0
    waits_for_device: bool = False


class Verdict(Enum):
    """What to think of it."""

    ALIVE = "alive"
    DOUBTFUL = "not responding"
    STOPPED = "was stopped"
    IDLE = "does nothing, with work to do"
    STUCK = "computes without getting anywhere"


@dataclass(slots=True)
class Watch:
    """One process.

    Attributes:
        patience: looks for which it may compute, or wait for a device, without getting anywhere.
    """

    patience: int
    _progress: int = -1
    _stopped: int = 0  # looks in a row
    _idle: int = 0
    _quiet: int = 0

    def look(self, *, heard: bool, busy: bool, read: Callable[[bool], Signs]) -> Verdict:
        """Judge.

        Args:
            heard: it has reported something since the last look.
            busy: it has work.
            read: what it is doing; told whether to look at more than its progress and whether it
                is stopped.
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
    """What a process is doing now; nothing of one that is gone.

    Args:
        pid: of the process.
        beacon: its own.
        thorough: look at all of its threads and children, which takes some milliseconds.
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
    """The word after the name, which may hold anything but ends with the last ); X if it ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _children(pid: int) -> list[int]:
    """Such as compilers, for which it waits."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
