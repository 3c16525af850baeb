"""Stores blocks as files: a folder per model and KV format, a file per block.

Several servers may share a folder. A file's time is its last use; a sweep removes all models'
oldest files beyond the cap. Imports no torch.

A file has 64 bytes, then the content: magic (8), fingerprint (16), hash (16), length (8,
little-endian), CRC-32 of fingerprint, hash and content (4, little-endian), zeros (12). A file that
does not hold exactly the wanted block is ignored. The checksum protects against disks and power
cuts, not attackers, who could compute any checksum. It takes a quarter of BLAKE2b's processor time,
which was half of the time to write a block.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_hashes import is_state
from appliance.engine.tiers.stored_models import ABOUT, NAME, SUFFIX, all_files, unlink
from appliance.files import check_private

if TYPE_CHECKING:
    from collections.abc import Mapping


MAGIC = b"APPLKV\x00\x02"  # increment the last byte when the meaning of the bytes changes
_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size
KEPT_BY_SWEEP = 0.9  # of the cap, so that not every block triggers a sweep
MAX_RESERVE = 1 << 30  # bytes to leave free on the file system, or a twentieth of a small one


@dataclass(slots=True)
class DiskCounters:
    """Totals since the store was opened, in blocks; and the bytes in use."""

    written: int = 0
    read: int = 0
    corrupt: int = 0  # truncated, damaged or foreign files, removed
    evicted: int = 0
    bytes_used: int = 0  # of all models, as of the last sweep and later writes


@dataclass(slots=True)
class DiskStore:
    """The blocks of one model and KV format, and its state checkpoints.

    Attributes:
        root: folder of all models.
        fingerprint: 16 bytes; hash of everything except tokens that determines a block's bytes.
        capacity: bytes of all files of all models.
        state_bytes: of a state checkpoint, for models with recurrent layers.
    """

    root: Path
    fingerprint: bytes
    block_bytes: int
    capacity: int
    about: Mapping[str, object]
    state_bytes: int = 0
    counters: DiskCounters = field(default_factory=DiskCounters)
    _known: set[bytes] = field(default_factory=set)

    def open(self) -> None:
        """Create the folder, for this user alone, and list its blocks; raises OSError."""
        self._make_folder()
        for name in os.listdir(self.folder):
            if found := NAME.fullmatch(name):
                self._known.add(bytes.fromhex(found[1]))

    @property
    def folder(self) -> Path:
        return self.root / self.fingerprint.hex()

    def __contains__(self, content: bytes) -> bool:
        return content in self._known

    def __len__(self) -> int:
        return len(self._known)

    def read(self, content: bytes) -> bytearray | None:
        """Read a block by hash; None if it is missing or damaged."""
        path = self._path(content)
        size = self.state_bytes if is_state(content) else self.block_bytes
        try:
            data = read_block_file(path, self.fingerprint, content, size)
        except ForeignBlockError:
            self.counters.corrupt += 1
            self._known.discard(content)
            unlink(path)
            return None
        except OSError as error:
            self._known.discard(content)
            self.counters.corrupt += error.errno not in (errno.ENOENT, errno.ENOTDIR)
            return None
        self.counters.read += 1
        return data

    def write(self, content: bytes, data: bytes | bytearray | memoryview, stamp_ns: int) -> None:
        """Write a block.

        Raises:
            OSError: writing failed, or the file system is almost full.
        """
        space = os.statvfs(self.root)
        reserve = min(MAX_RESERVE, space.f_blocks * space.f_frsize // 20)
        if space.f_bavail * space.f_frsize < reserve + len(data):
            room = f"{reserve >> 20} MiB" if reserve >> 20 else f"{reserve >> 10} KiB"
            raise OSError(errno.ENOSPC, f"less than {room} would stay free")
        try:
            write_block_file(self._path(content), self.fingerprint, content, data, stamp_ns)
        except FileNotFoundError:  # someone removed the folder
            self._make_folder()
            write_block_file(self._path(content), self.fingerprint, content, data, stamp_ns)
        self._known.add(content)
        self.counters.written += 1
        self.counters.bytes_used += HEADER_BYTES + len(data)
        if self.counters.bytes_used > self.capacity:
            self.sweep()

    def touch(self, content: bytes, stamp_ns: int) -> None:
        """Record the use of a block; forget it if its file is gone."""
        try:
            os.utime(self._path(content), ns=(stamp_ns, stamp_ns))
        except FileNotFoundError:
            self._known.discard(content)
        except OSError:
            return  # it merely looks older

    def sweep(self) -> None:
        """Count all files of all models, and remove the oldest if they exceed the cap."""
        files = sorted(all_files(self.root))
        total = sum(size for _, size, _ in files)
        if total > self.capacity:
            for _, size, path in files:
                if total <= self.capacity * KEPT_BY_SWEEP:
                    break
                total -= size
                if path.parent == self.folder:
                    self._known.discard(bytes.fromhex(path.stem))
                self.counters.evicted += unlink(path)
        self.counters.bytes_used = total

    def _make_folder(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self.root)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        check_private(self.folder, inside=True)
        temporary = self.folder / f".{ABOUT}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(self.about))
        temporary.replace(self.folder / ABOUT)

    def _path(self, content: bytes) -> Path:
        return self.folder / f"{content.hex()}{SUFFIX}"


def read_block_file(path: Path, fingerprint: bytes, content: bytes, size: int) -> bytearray:
    """Read a block's bytes.

    Args:
        fingerprint: of weights and format.
        content: the block's chained hash.

    Raises:
        ForeignBlockError: the file holds something else.
        OSError: it cannot be read.
    """
    head, data, beyond = bytearray(HEADER_BYTES), bytearray(size), bytearray(1)
    # Not blocking: opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ForeignBlockError(f"{path} is no regular file")
        # A read that a signal cuts short counts as damage: a harmless miss.
        num_read = os.readv(descriptor, [head, data, beyond])
    finally:
        os.close(descriptor)
    if num_read != HEADER_BYTES + size:
        raise ForeignBlockError(f"{path} has not the size of a block")
    if bytes(head) != header(fingerprint, content, data):
        raise ForeignBlockError(f"{path} is damaged or of another model")
    return data


def write_block_file(
    path: Path,
    fingerprint: bytes,
    content: bytes,
    data: bytes | bytearray | memoryview,
    stamp_ns: int,
) -> None:
    """Write a block to its file atomically.

    Does not wait for the disk: after a power cut the checksum reveals missing data.

    Args:
        fingerprint: of weights and format.
        content: the block's chained hash.
        stamp_ns: time of last use, set as the file's time.

    Raises:
        OSError: writing failed; removes the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        try:
            rest = [memoryview(header(fingerprint, content, data)), memoryview(data)]
            while rest:
                written = os.writev(descriptor, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
            os.utime(descriptor, ns=(stamp_ns, stamp_ns))
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def header(fingerprint: bytes, content: bytes, data: bytes | bytearray | memoryview) -> bytes:
    return _HEADER.pack(
        MAGIC, fingerprint, content, len(data), _checksum(fingerprint, content, data)
    )


def _checksum(fingerprint: bytes, content: bytes, data: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(fingerprint + content))


class ForeignBlockError(Exception):
    """The file is truncated, damaged or not the block that its name says."""
