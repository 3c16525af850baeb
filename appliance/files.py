"""Reads files that other processes may truncate or replace, and writes files atomically.

A leaf: imports nothing of ours but errors.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import BufferedReader
    from pathlib import Path


# How files begin that stand in another's place: what they are, and what to do.
_STAND_INS = {
    b"version ": ("a Git LFS pointer, not the file itself", "fetch the file with `git lfs pull`"),
    b"<!DOCTYP": ("a web page", "download it again"),
    b"<!doctyp": ("a web page", "download it again"),
}


_KINDS = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))


@dataclass(frozen=True, slots=True)
class FileIdentity:
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """Read the identity of a path or an open file descriptor.

        Raises:
            CheckpointError: the file does not exist, is unreadable or no regular file.
        """
        try:
            found = os.stat(file)
            if not stat.S_ISREG(found.st_mode) and not isinstance(file, int):
                raise _no_regular(file, found.st_mode)
        except OSError as error:
            raise unreadable(file, error) from error
        return cls(size=found.st_size, modified_ns=found.st_mtime_ns, inode=found.st_ino)


def stamp_of(path: Path) -> str:
    """Return a stamp that changes with a file, or with any file in a folder; "" if unreadable."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(file.name, os.stat(file)) for file in files if file.is_file()]
    except OSError:
        return ""
    return ";".join(f"{name}:{one.st_size}:{one.st_mtime_ns}:{one.st_ino}" for name, one in found)


def bytes_on_disk(path: Path) -> int:
    """Sum the bytes of a file, or of all files under a folder, without reserved space.

    Files that disappear meanwhile, and links, count nothing.
    """
    total = 0
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in inside if path.is_dir() else (path,):
        try:
            found = os.lstat(file)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            total += min(found.st_size, found.st_blocks * 512)
    return total


def read_into(path: Path, identity: FileIdentity, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of `path` from `offset` on.

    Does not map the file: truncating a mapped file kills the process that reads it.

    Raises:
        CheckpointError: the file is gone or no longer matches `identity`.
    """
    try:
        with open_regular(path) as file:
            same = FileIdentity.of(file.fileno()) == identity
            file.seek(offset)
            complete = file.readinto(buffer) == len(buffer)
    except OSError as error:
        raise unreadable(path, error) from error
    if not (same and complete):
        raise CheckpointError(f"{path} changed while it was read; start again once it is complete")


def unreadable(path: Path | int, error: OSError) -> CheckpointError:
    """Build the error for a file that cannot be read: why, and what to do."""
    if not isinstance(path, int) and os.path.islink(path) and not os.path.exists(path):
        return CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not there; download it again, or"
            " mount the drive on which that lies"
        )
    advice = {
        errno.ENOENT: "download it",
        errno.EISDIR: "download the file of that name in its place",
        errno.EACCES: "give this user the right to read it, with chmod or chown",
        errno.EINVAL: "put the file itself there",
    }.get(error.errno or 0, "check its name, and the disk on which it lies")
    return CheckpointError(f"cannot read {path}: {error.strerror}; {advice}")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Waits for nobody: opening a FIFO would wait for a writer, and a device may never end.

    Raises:
        OSError: it is unreadable or no regular file.
    """
    try:
        with ExitStack() as undo:
            file = undo.enter_context(open(path, "rb", opener=_open_at_once))
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _no_regular(path, mode)
            undo.pop_all()
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a socket, or a device that is not there
            raise
        raise _no_regular(path, os.stat(path).st_mode) from None
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def read_bytes(path: Path) -> bytes:
    """Read a regular file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_whole(path: Path) -> bytes:
    """Read a file of a model.

    Raises:
        CheckpointError: another file stands in its place.
        OSError: it is unreadable or no regular file.
    """
    content = read_bytes(path)
    refuse_stand_in(path, content)
    return content


def read_text(path: Path) -> str:
    """Read a regular file in UTF-8; see `open_regular`.

    Raises:
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path).decode()


def _no_regular(path: Path, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds.

    Flushes the content to disk before the rename. If the block raises, removes the temporary file
    and leaves `path` alone.
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
    """Refuse a folder that another user created or can write to.

    Changes nothing through a link: its author could point us at another folder.

    Args:
        inside: our own folder within a checked one; must not be a link, and is closed to other
            users if open.

    Raises:
        OSError: the folder is unusable; `strerror` says what to do.
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
        CheckpointError: the file does not exist or contains no JSON object.
    """
    try:
        content = read_bytes(path)
        value = json.loads(content)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        refuse_stand_in(path, content)
        reason = str(error).partition("; use sys.")[0]
        raise CheckpointError(f"{path} is not valid JSON: {reason}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def refuse_stand_in(path: Path, content: bytes) -> None:
    """Raise CheckpointError if a file's first bytes are those of another in its place."""
    found = _STAND_INS.get(content[:8])
    if found is not None:
        raise CheckpointError(f"{path} is {found[0]}; {found[1]}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a file atomically.

    Raises:
        CheckpointError: writing failed.
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
