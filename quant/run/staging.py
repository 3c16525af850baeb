"""A folder that comes into being whole: built under another name beside it, then renamed.

Beside what will be the result lies what a later run needs to go on from here, so that neither a
kill nor a full disk costs more than the work of a moment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.files import flush

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Staging:
    """Where a result is built.

    Attributes:
        out: what it will be called; resolved.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """Holds all there is until `publish`."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def result(self) -> Path:
        """What becomes `out`; exists."""
        return self.folder / "result"

    @property
    def state(self) -> Path:
        """What a later run goes on from; exists."""
        return self.folder / "state"

    def start_over(self) -> None:
        """Forget all work that was done; both folders are empty."""
        for part in (self.state, self.result):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        flush(self.folder)
        flush(self.out.parent)

    def publish(self) -> None:
        """Give the result, which is on the disk, its name, in place of an older folder.

        When this is cut short at any point, calling it again completes it.
        """
        replaced = self.out.with_name(f".{self.out.name}.replaced")
        if self.result.exists():
            if self.out.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self.out.rename(replaced)
            self.result.rename(self.out)
            flush(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        self.discard()

    def discard(self) -> None:
        """Leave nothing but `out`, if there is one."""
        shutil.rmtree(self.folder, ignore_errors=True)


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
def locked(staging: Staging) -> Iterator[None]:
    """Keep all other processes from a staging folder, which is as an earlier run left it.

    Raises:
        QuantizeError: another process is at work on the same result.
    """
    staging.out.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(staging.folder, staging.out)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out`, on the disk, when the block ends; for short work.

    When the block raises, nothing of it stays and an older `out` is untouched.

    Raises:
        QuantizeError: another process is at work on the same `out`.
    """
    staging = Staging(out)
    with locked(staging):
        staging.start_over()
        try:
            yield staging.result
            for path in staging.result.iterdir():
                flush(path)
            flush(staging.result)
        except BaseException:
            staging.discard()
            raise
        staging.publish()


def _locked(folder: Path, out: Path) -> int:
    """A descriptor that holds the lock of a folder, which is made where it is not there."""
    while True:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise QuantizeError(f"another process is writing {out}; wait for it to end") from error
        except FileNotFoundError:
            pass  # whoever held the lock has just finished and removed the folder
        os.close(descriptor)
