"""One block's content as a file: whose it is, what it is, and a checksum over all of that.

64 bytes, then the content: magic (8), fingerprint (16), hash (16), length (8, little-endian),
CRC-32 of fingerprint, hash and content (4, little-endian), zeros (12). Nothing is ever taken from a
file that does not hold exactly what was asked for.

The checksum is against what disks and power cuts do, not against people, who could compute any
other one as well: a quarter of what BLAKE2b takes of a processor, which was half of all that
writing a block took.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"APPLKV\x00\x02"  # the last byte grows when the meaning of the bytes changes
SUFFIX = ".kv"
_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size


class ForeignBlockError(Exception):
    """A file that is cut, damaged or not the block that its name says."""


def header(fingerprint: bytes, content: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """What stands before a block's bytes."""
    return _HEADER.pack(
        MAGIC, fingerprint, content, len(data), _checksum(fingerprint, content, data)
    )


def read_block_file(path: Path, fingerprint: bytes, content: bytes, size: int) -> bytearray:
    """A block's bytes.

    Args:
        path: the file.
        fingerprint: of weights and format.
        content: the block's chained hash.
        size: bytes that it must hold.

    Raises:
        ForeignBlockError: it holds something else.
        OSError: it cannot be read.
    """
    head, data, beyond = bytearray(HEADER_BYTES), bytearray(size), bytearray(1)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # What a signal cuts short is taken for damage: such a read is a miss, and no harm.
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
    """Write a block under its name, whole or not at all.

    Nothing waits for the disk: after a power cut the checksum tells what did not get there.

    Args:
        path: the file.
        fingerprint: of weights and format.
        content: the block's chained hash.
        data: its bytes.
        stamp_ns: when it was used last, as the time of the file.

    Raises:
        OSError: it cannot be written; nothing of it stays.
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
