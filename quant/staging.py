"""A folder that comes into being whole: built under another name beside it, then renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def check_destination(out: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a destination before any work is done for it.

    Raises:
        QuantizeError: it exists and may not be replaced, or is not for this to replace.
    """
    if out == source or out in source.parents:
        raise QuantizeError(f"{out} holds the model that is read; choose another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise QuantizeError(f"{out} is a file; choose a folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise QuantizeError(f"{out} exists; add --overwrite to replace it or choose another")
    if not (out / "config.json").is_file():
        raise QuantizeError(f"{out} is not a model folder and is not replaced; choose another")


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out`, on disk to the last byte, when the block ends.

    When the block raises, nothing of it stays and an older `out` is untouched. What a killed
    run left behind is removed by the next one.

    Args:
        out: resolved; an older folder of that name is replaced.

    Raises:
        QuantizeError: another process is at work on the same `out`.
    """
    staging = out.with_name(f".{out.name}.partial")
    replaced = out.with_name(f".{out.name}.replaced")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging.mkdir(exist_ok=True)
    lock = os.open(staging, os.O_RDONLY)
    try:
        _lock(lock, out)
        _empty(staging)
        try:
            yield staging
            for path in staging.iterdir():
                _flush(path)
            _flush(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
        staging.rename(out)
        _flush(out.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise QuantizeError(f"another process is writing {out}; wait for it to end") from error


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
