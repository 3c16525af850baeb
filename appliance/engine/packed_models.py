"""Keeps packed weights in a folder, so that later starts map them; imports no torch.

A file for each model, part and layout. Its time is its last use; the oldest are removed beyond the
cap. Several processes may share the folder: all map one file, and its memory is there once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.files import check_private, stamp_of
from appliance.kernels.cpu.library import LIBRARY
from appliance.kernels.cpu.packed_file import (
    PackedFileError,
    map_packed,
    open_packed,
    packed_bytes,
    read_description,
    write_packed,
)
from appliance.long_lived import start_thread
from appliance.model_files.gguf_names import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.config import EngineConfig
    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.structs import ModelStruct

SUFFIX = ".weights"
STALE_SECONDS = 3600  # age of an abandoned unfinished file
MAX_RESERVE = 10 << 30  # bytes to leave free on the file system, or a tenth of a smaller one
LEAST_KEPT = 32 << 20  # bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedModels:
    """The packed weights of one model, in a folder of many.

    Attributes:
        root: the folder.
        capacity: bytes of all files in it.
        model: the file or folder that the weights come from.
        least: bytes of weights that are kept; fewer are packed as soon as they are found.
    """

    root: Path
    capacity: int
    model: Path
    least: int = LEAST_KEPT

    @classmethod
    def of(cls, config: EngineConfig) -> PackedModels | None:
        """Return the folder that the settings name; None if nothing is kept."""
        if config.packed_weights in ("auto", "off"):
            return None
        root = Path(config.packed_weights).expanduser()
        return cls(root, config.packed_weights_size, Path(config.model))

    def beside(self, model: Path) -> PackedModels:
        """Return the weights of another model in the folder, such as a draft model."""
        return replace(self, model=model)

    def note(self) -> str:
        """Describe what is kept, for the user."""
        return (
            f"packed weights are kept in {self.root}, up to {self.capacity / 2**30:.1f} GiB; later"
            " starts map them: their memory is shared, and the system takes it back when it is"
            " short; --packed-weights off keeps nothing, appliance cache rm removes them"
        )

    def find(
        self, layout: str, engine: NativeEngine
    ) -> tuple[Arena, ModelStruct, dict[str, Any]] | None:
        """Map weights that are kept; None if they are not. A damaged file is removed."""
        key = self._key(layout)
        path = self._path(key)
        try:
            descriptor = open_packed(path)
            try:
                arena, model, about = map_packed(descriptor, engine.library, key, engine.threads)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except (PackedFileError, OSError, MemoryError) as error:
            logger.warning("packed weights %s cannot be used (%s); packing again", path, error)
            if isinstance(error, PackedFileError):
                _remove(path)
            return None
        with contextlib.suppress(OSError):  # it merely looks older
            os.utime(path)
        return arena, model, about["decoder"]

    def keep(
        self,
        layout: str,
        engine: NativeEngine,
        arena: Arena,
        model: ModelStruct,
        about: dict[str, Any],
    ) -> None:
        """Write weights in a thread beside the steps; a disk that refuses costs nothing else."""
        key, nbytes = self._key(layout), packed_bytes(arena)
        if nbytes < self.least:
            return
        if nbytes > self.capacity:
            logger.warning(
                "packed weights are not kept: they take %.1f GiB, and --packed-weights-size allows"
                " %.1f",
                nbytes / 2**30,
                self.capacity / 2**30,
            )
            return
        described = {"model": str(self.model), "made": time.time(), "decoder": about}

        def write() -> None:
            try:
                self._write(key, engine, arena, model, described, nbytes)
            except OSError as error:
                logger.warning(
                    "packed weights are not kept, so the next start packs again: %s (%s)",
                    self.root,
                    error.strerror,
                )

        start_thread(write, "packed weights")

    def _write(
        self,
        key: str,
        engine: NativeEngine,
        arena: Arena,
        model: ModelStruct,
        about: dict[str, Any],
        nbytes: int,
    ) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self.root)
        self._make_room(nbytes)
        partial = self.root / f"{key}.{os.getpid()}.tmp"
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_packed(descriptor, engine.library, arena, model, key, about)
            os.replace(partial, self._path(key))
        except BaseException:
            _remove(partial)
            raise
        finally:
            os.close(descriptor)
        logger.info("packed weights are kept in %s", self._path(key))

    def _make_room(self, nbytes: int) -> None:
        """Remove the oldest files until another fits.

        Raises:
            OSError: the file system has too little space.
        """
        kept = sorted(kept_files(self.root), key=lambda one: one.used)
        total = sum(one.num_bytes for one in kept)
        for one in kept:
            if total + nbytes <= self.capacity:
                break
            total -= one.num_bytes
            _remove(one.path)
        space = os.statvfs(self.root)
        reserve = min(MAX_RESERVE, space.f_blocks * space.f_frsize // 10)
        if space.f_bavail * space.f_frsize < reserve + nbytes:
            raise OSError(errno.ENOSPC, f"less than {reserve / 2**30:.1f} GiB would stay free")

    def _key(self, layout: str) -> str:
        """Hash all that packed weights depend on; a rewritten file counts as a new one."""
        from appliance.engine.served_model import weights_digest  # loads what `cache` does without

        digest = hashlib.blake2b(layout.encode(), digest_size=16)
        digest.update(hashlib.blake2b(LIBRARY.read_bytes()).digest())
        digest.update(weights_digest(self.model))
        for path in [self.model] if self.model.is_dir() else parts_of(self.model):
            digest.update(stamp_of(path).encode())
        return digest.hexdigest()

    def _path(self, key: str) -> Path:
        return self.root / f"{key}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of packed weights.

    Attributes:
        used: Unix seconds of the last use.
    """

    path: Path
    num_bytes: int
    used: float

    @property
    def id(self) -> str:
        return self.path.stem

    def model(self) -> str:
        """Read which model it is of; empty if it does not say."""
        try:
            descriptor = open_packed(self.path)
            try:
                about = read_description(descriptor)[0].about
            finally:
                os.close(descriptor)
        except (PackedFileError, OSError):
            return ""
        return str(about.get("model", ""))


def kept_files(root: Path) -> Iterator[KeptFile]:
    """Yield the files in a folder; remove unfinished ones that nobody writes any more."""
    try:
        entries = list(os.scandir(root))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):  # another process was faster
            found = entry.stat(follow_symlinks=False)
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                yield KeptFile(Path(entry.path), found.st_size, found.st_mtime)
            elif entry.name.endswith(".tmp") and found.st_mtime < time.time() - STALE_SECONDS:
                _remove(Path(entry.path))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
