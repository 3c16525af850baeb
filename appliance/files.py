"""Reads files that others may cut or replace, and writes files atomically.

A leaf: imports nothing of ours but errors.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Distinguishes versions of a file."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """Read the identity of a path or of an open file descriptor.

        Raises:
            CheckpointError: the file does not exist or is unreadable.
        """
        try:
            found = os.stat(file)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        return cls(size=found.st_size, modified_ns=found.st_mtime_ns, inode=found.st_ino)


def stamp_of(path: Path) -> str:
    """Return what distinguishes versions of a file, or of all files in a folder.

    Empty if there is nothing, or nothing that may be read.
    """
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(file.name, os.stat(file)) for file in files if file.is_file()]
    except OSError:
        return ""
    return ";".join(f"{name}:{one.st_size}:{one.st_mtime_ns}:{one.st_ino}" for name, one in found)


def read_into(path: Path, identity: FileIdentity, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of `path` from `offset` on.

    The file is not mapped: truncating a mapped file kills the process that reads it.

    Raises:
        CheckpointError: the file is gone, or is no longer the one that `identity` describes.
    """
    try:
        with path.open("rb") as file:
            same = FileIdentity.of(file.fileno()) == identity
            file.seek(offset)
            complete = file.readinto(buffer) == len(buffer)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not (same and complete):
        raise CheckpointError(f"{path} changed while it was read; start again once it is complete")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block succeeds.

    The content is flushed to disk before the rename. If the block raises, nothing of it stays and
    an older `path` is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_private(folder: Path, *, inside: bool = False) -> None:
    """Refuse a folder that another user has created or can write to.

    Nothing is changed through a link: its author could make us open another folder.

    Args:
        inside: it is one of ours in a checked folder: it must not be a link, and is closed to
            others if it is open.

    Raises:
        OSError: it is unusable; `strerror` says what to do.
    """
    link, own = os.lstat(folder), os.geteuid()
    if stat.S_ISLNK(link.st_mode) and (inside or link.st_uid not in (0, own)):
        raise PermissionError(errno.EPERM, f"{folder} is a link of somebody else; remove it")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if inside else 0)
    descriptor = os.open(folder, flags)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != own:
            raise PermissionError(errno.EPERM, f"{folder} belongs to another user; chown it")
        if inside and stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
        elif found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"others may write to {folder}; chmod 700 it")
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file does not exist, or contains no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; a model folder needs {path.name}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a file atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with replace_atomically(path) as temporary:
            temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
