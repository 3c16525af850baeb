"""Publishes progress of long tasks to dashboards on the same machine.

Each task keeps a small file in a folder, and a lock beside it. A server reads them only while
someone watches. If the lock is free, the file's process has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from appliance.events import Job
from appliance.files import open_regular

WRITE_SECONDS = 0.5  # between two writes
MAX_BYTES = 2**16
MAX_JOBS = 16


class JobFile:
    """Publishes the progress of this process's task while it is open.

    Publishes nothing if the folder is not writable: the task must go on.

    Args:
        folder: see `appliance.config.jobs_dir`; created if missing.
        name: such as "quantize SmolLM2-135M".
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._name = name
        self._lock: BinaryIO | None = None
        self._stage = ""
        self._begin = (0.0, 0)  # time and `done` at the beginning of the stage
        self._next = 0.0

    def __enter__(self) -> JobFile:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for path in self._path.parent.glob("*.json"):
                if not _is_going_on(path):
                    _remove(path)
            self._lock = _lock_of(self._path).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            _remove(self._path)
        if self._lock is not None:
            self._lock.close()

    def update(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        seconds_left: float | None = None,
        part: str = "",
        parts_done: int = 0,
        parts_total: int = 0,
        loss: float | None = None,
    ) -> None:
        """Publish the progress of a stage.

        Args:
            stage: a description.
            done: of `total`.
            total: 0 means unknown.
            seconds_left: None estimates it from the stage's pace.
            part: the last finished part, such as "layer 3".
            parts_done: of `parts_total`.
            parts_total: 0 if there are no parts.
            loss: of that part, as a share of its outputs' energy.
        """
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._begin, self._next = stage, (now, done), 0.0
        if now < self._next and done < total:
            return
        self._next = now + WRITE_SECONDS
        begin, first = self._begin
        if seconds_left is None and done > first and total > done:
            seconds_left = (now - begin) / (done - first) * (total - done)
        job = Job(
            name=self._name,
            stage=stage,
            done=done,
            total=total,
            seconds_left=seconds_left,
            part=part,
            parts_done=parts_done,
            parts_total=parts_total,
            loss=loss,
        )
        with contextlib.suppress(OSError):
            partial = self._path.with_suffix(".new")
            partial.write_bytes(msgspec.json.encode(job))
            partial.replace(self._path)


def read_jobs(folder: Path) -> dict[str, Job]:
    """Return all running tasks by file name."""
    jobs: dict[str, Job] = {}
    for path in sorted(folder.glob("*.json"))[:MAX_JOBS]:
        if not _is_going_on(path):
            continue
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            with open_regular(path) as file:
                content = file.read(MAX_BYTES)
            jobs[path.stem] = msgspec.json.decode(content, type=Job)
    return jobs


def stale_jobs(folder: Path) -> list[Path]:
    """List the files of ended processes, for the next task to remove."""
    return [path for path in sorted(folder.glob("*.json")) if not _is_going_on(path)]


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _remove(path: Path) -> None:
    for one in (path, path.with_suffix(".new"), _lock_of(path)):
        one.unlink(missing_ok=True)


def _is_going_on(path: Path) -> bool:
    try:
        with open_regular(_lock_of(path)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
