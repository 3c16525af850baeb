"""Reports another program's download progress by the growth of a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.files import bytes_on_disk
from appliance.long_lived import start_thread

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
    before = bytes_on_disk(folder)
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(INTERVAL):
            done = max(0, bytes_on_disk(folder) - before)
            progress(stage, min(done, total - 1), total)  # the full total only at the end

    progress(stage, 0, total)
    watcher = start_thread(watch, "download-progress")
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    progress(stage, total, total)
