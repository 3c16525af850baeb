"""Builds a folder under another name and renames it when it is complete.

A later run continues from it, so a kill or a full disk costs little work.
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
from appliance.quant.run.options import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class StagingFolders:
    """Folders in which a result is built.

    Attributes:
        out: the result's final path, resolved.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """Holds everything until `publish`."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def result(self) -> Path:
        """Folder that becomes `out`; exists."""
        return self.folder / "result"

    @property
    def state(self) -> Path:
        """State from which a later run continues; exists."""
        return self.folder / "state"

    def start_over(self) -> None:
        """Discard all finished work and leave both folders empty."""
        for part in (self.state, self.result):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        flush(self.folder)
        flush(self.out.parent)

    def publish(self) -> None:
        """Rename the result, which is on disk, to `out`, replacing an older folder.

        If it is interrupted, calling it again completes it.
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
        shutil.rmtree(self.folder, ignore_errors=True)


def model_of(out: Path, format: WeightFormat) -> Path:
    """Return the model in a result's folder: the folder itself, or its GGUF file."""
    return out / f"{out.name}.gguf" if format is WeightFormat.GGUF else out


def check_destination(out: Path, source: Path, *, overwrite: bool) -> None:
    """Raise QuantizeError if a destination must not be replaced or is no model folder."""
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
    if not (out / "config.json").is_file() and not model_of(out, WeightFormat.GGUF).is_file():
        raise QuantizeError(f"{out} is not a model folder and is not replaced; choose another")


@contextmanager
def locked(staging: StagingFolders) -> Iterator[None]:
    """Lock a staging folder, with the remains of an earlier run, against other processes.

    Raises:
        QuantizeError: another process is writing the same result.
    """
    staging.out.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(staging.folder, staging.out)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder and publish it as `out` when the block ends; for short work.

    If the block raises, the folder is removed and an older `out` is untouched.

    Raises:
        QuantizeError: another process is writing the same `out`.
    """
    staging = StagingFolders(out)
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
    """Create the folder if needed and lock it; return the descriptor that holds the lock."""
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
            pass  # the last holder just removed the folder
        os.close(descriptor)
