"""Progress of a download that somebody else makes, read from how a folder grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

INTERVAL = 0.2  # seconds between two looks


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def watch_growth(folder: Path, stage: str, total: int, progress: Progress) -> Iterator[None]:
    """Report the bytes that appear under `folder` while the block runs, and all of them after it.

    Args:
        folder: need not exist yet.
        stage: what is going on, for people.
        total: bytes that are expected to appear.
        progress: is called from another thread.
    """
    before = _bytes_under(folder)
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(INTERVAL):
            done = max(0, _bytes_under(folder) - before)
            progress(stage, min(done, total - 1), total)  # all of it only when it is over

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    progress(stage, 0, total)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    progress(stage, total, total)


def _bytes_under(folder: Path) -> int:
    """Bytes on disk, so that space set aside for a file does not count as its content."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if not path.is_symlink() and path.is_file():
                stat = path.stat()
                total += min(stat.st_size, stat.st_blocks * 512)
        except OSError:
            continue  # it was moved in the meantime
    return total
