"""Stores one block's content as a file with its identity and a checksum.

64 bytes, then the content: magic (8), fingerprint (16), hash (16), length (8, little-endian),
CRC-32 of fingerprint, hash and content (4, little-endian), zeros (12). Ignores a file that does not
hold exactly the wanted block.

The checksum protects against disks and power cuts, not attackers, who could compute any checksum.
It takes a quarter of BLAKE2b's processor time, which was half of the time to write a block.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"APPLKV\x00\x02"  # increment the last byte when the meaning of the bytes changes
SUFFIX = ".kv"
_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size


class ForeignBlockError(Exception):
    """The file is truncated, damaged or not the block that its name says."""


def header(fingerprint: bytes, content: bytes, data: bytes | bytearray | memoryview) -> bytes:
    return _HEADER.pack(
        MAGIC, fingerprint, content, len(data), _checksum(fingerprint, content, data)
    )


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


def _checksum(fingerprint: bytes, content: bytes, data: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(fingerprint + content))
