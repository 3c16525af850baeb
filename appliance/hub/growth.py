"""Reports another program's download progress by the growth of a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

INTERVAL = 0.2  # seconds between measurements


def ignore_progress(stage: str, done: int, total: int) -> None: ...


@contextmanager
def watch_growth(folder: Path, stage: str, total: int, progress: Progress) -> Iterator[None]:
    """Report new bytes under `folder` while the block runs, then the total.

    Args:
        folder: may not exist yet.
        progress: called from another thread.
    """
    before = _bytes_under(folder)
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(INTERVAL):
            done = max(0, _bytes_under(folder) - before)
            progress(stage, min(done, total - 1), total)  # the full total only at the end

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
    """Sum bytes on disk, without reserved space."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if not path.is_symlink() and path.is_file():
                stat = path.stat()
                total += min(stat.st_size, stat.st_blocks * 512)
        except OSError:
            continue  # it was moved
    return total
