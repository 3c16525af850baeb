"""A model's packed weights in one file, which later starts map instead of packing again.

A file has a header, then the memory of an arena as it was. Structs in it hold addresses of that
memory; mapped elsewhere, these are moved. All other pages stay as the file has them, so that they
are shared with whoever maps it, and the system takes them back when memory is short.

The header: magic (8 bytes), length of a description and its CRC-32 (4 each, little-endian), the
description as JSON, and zeros up to a multiple of `PAGE`. Sums of all memory are in the
description; they protect against disks and power cuts, not against attackers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import zlib
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.kernels.cpu.arena import Arena, Mapping
from appliance.kernels.cpu.structs import MODEL_STRUCTS, LayerStruct, ModelStruct

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = b"APPLWT\x00\x01"  # increment the last byte when the meaning of the bytes changes
PAGE = 4096  # bytes, to whose multiples extents are padded
SUMMED = 1 << 20  # bytes of one sum, AP_SUMMED
_HEAD = struct.Struct("<8sII")
_MOST_HEADER = 256 << 20  # bytes
_AT_ONCE = 32 << 20  # bytes written, or summed by one thread, at a time
_NAMES = {kind: name for name, kind in MODEL_STRUCTS.items()}


class PackedFileError(Exception):
    """A file is none of ours, damaged, or not to be trusted."""


class Extent(msgspec.Struct, frozen=True):
    """Memory that was in one piece.

    Attributes:
        address: where it was when the file was written.
    """

    address: int
    nbytes: int


class StructsAt(msgspec.Struct, frozen=True):
    """Structs of one kind, one after another, at an address of that time; see `MODEL_STRUCTS`."""

    address: int
    name: str
    count: int


class Description(msgspec.Struct, frozen=True):
    """A file's contents.

    Attributes:
        key: of the model, the layout and the library that made it.
        nbytes: handed out by the arena.
        about: what is known of the model besides.
        extents: in the order of the file.
        layers: address of its `ap_layer`s, one after another.
        model: address of its `ap_model`, whose layers and RoPEs are elsewhere.
        sums: of each `SUMMED` bytes of each extent, and of its rest.
    """

    key: str
    nbytes: int
    about: dict[str, Any]
    extents: list[Extent]
    structs: list[StructsAt]
    layers: StructsAt
    model: StructsAt
    sums: list[int]


def packed_bytes(arena: Arena) -> int:
    """Return the bytes of an arena's file, but for its header and the structs of layers."""
    return sum(padded(nbytes) for _, nbytes in arena.handed_out())


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def write_packed(
    descriptor: int,
    library: ctypes.CDLL,
    arena: Arena,
    model: ModelStruct,
    key: str,
    about: dict[str, Any],
) -> None:
    """Write an arena and the model in it to an empty file, through to the disk.

    The pages that are written leave the system's cache, so that this takes no memory from others.

    Raises:
        OSError: writing failed.
    """
    roots = Arena()
    layers = _copied(roots, LayerStruct, model.layers, model.num_layers)
    whole = _copied(roots, ModelStruct, ctypes.pointer(model), 1)
    extents = [Extent(*one) for one in (*arena.handed_out(), *roots.handed_out())]
    pieces = [
        (one.address + at, min(_AT_ONCE, one.nbytes - at))
        for one in extents
        for at in range(0, one.nbytes, _AT_ONCE)
    ]
    description = Description(
        key=key,
        nbytes=arena.nbytes,
        about=about,
        extents=extents,
        structs=[
            StructsAt(at, _NAMES[kind], n) for at, kind, n in (*arena.structs, *roots.structs)
        ],
        layers=layers,
        model=whole,
        sums=[one for piece in pieces for one in sums_of(library, *piece)],
    )
    text = msgspec.json.encode(description)
    head = _HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text
    _write(descriptor, memoryview(head.ljust(padded(len(head)), b"\0")))
    for address, nbytes in pieces:
        memory = (ctypes.c_char * nbytes).from_address(address)
        _write(descriptor, memoryview(memory).cast("B"))
        _write(descriptor, memoryview(bytes(padded(nbytes) - nbytes)))
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.fsync(descriptor)


def _copied(arena: Arena, kind: type[ctypes.Structure], first: Any, count: int) -> StructsAt:
    nbytes = ctypes.sizeof(kind) * count
    address = arena.claim(nbytes)
    ctypes.memmove(address, first, nbytes)
    return StructsAt(address, _NAMES[kind], count)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sums_of(library: ctypes.CDLL, address: int, nbytes: int) -> list[int]:
    """Return the sums of memory, one for each `SUMMED` bytes; reads all of it."""
    sums = (ctypes.c_uint64 * -(-nbytes // SUMMED))()
    status = library.ap_sums(address, nbytes, sums)
    assert status == 0, f"ap_sums of {nbytes} bytes returned {status}"
    return list(sums)


def read_description(descriptor: int) -> tuple[Description, int]:
    """Read a file's description; return it with the offset of its memory.

    Raises:
        PackedFileError: it has none, or a damaged one, or is not as long as it says.
        OSError: reading failed.
    """
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) != _HEAD.size or not head.startswith(MAGIC):
        raise PackedFileError("it does not begin as packed weights of this version do")
    _, length, crc = _HEAD.unpack(head)
    text = os.pread(descriptor, length, _HEAD.size) if length <= _MOST_HEADER else b""
    if len(text) != length or zlib.crc32(text) != crc:
        raise PackedFileError("its description is damaged")
    try:
        found = msgspec.json.decode(text, type=Description)
    except msgspec.DecodeError as error:
        raise PackedFileError(f"its description is of another version ({error})") from None
    begin = padded(_HEAD.size + length)
    expected = begin + sum(padded(one.nbytes) for one in found.extents)
    if (size := os.fstat(descriptor).st_size) != expected:
        raise PackedFileError(f"it has {size:,} bytes, not {expected:,}")
    return found, begin


def map_packed(
    descriptor: int, library: ctypes.CDLL, key: str, threads: int
) -> tuple[Arena, ModelStruct, dict[str, Any]]:
    """Map a file, check all of its memory, and move the addresses in it.

    Args:
        threads: that read the memory at the same time.

    Returns:
        The arena, the model without RoPEs, and what was written about it.

    Raises:
        PackedFileError: it is of another key, or damaged.
        MemoryError: the system does not map it.
        OSError: reading failed.
    """
    found, begin = read_description(descriptor)
    if found.key != key:
        raise PackedFileError("it is of another model")
    mapping = Mapping.of_file(descriptor, os.fstat(descriptor).st_size)
    _check_sums(library, found, mapping.address + begin, threads)
    places = _Places(found.extents, mapping.address + begin)
    for one in found.structs:
        places.structs(one)
    arena = Arena(mapping, found.nbytes)
    model = ModelStruct.from_address(places.structs(found.model))
    layers = ctypes.c_void_p(places.structs(found.layers))
    model.layers = ctypes.cast(layers, ctypes.POINTER(LayerStruct))
    return arena, model, found.about


def _check_sums(library: ctypes.CDLL, found: Description, begin: int, threads: int) -> None:
    """Read all memory once, which brings it in, and compare its sums.

    Raises:
        PackedFileError: they differ.
    """
    pieces, address = list[tuple[int, int]](), begin
    for one in found.extents:
        for at in range(0, one.nbytes, _AT_ONCE):
            pieces.append((address + at, min(_AT_ONCE, one.nbytes - at)))
        address += padded(one.nbytes)
    if any(nbytes % 64 for _, nbytes in pieces):
        raise PackedFileError("its description is of another version")
    with ThreadPoolExecutor(threads) as pool:
        sums = pool.map(lambda piece: sums_of(library, *piece), pieces)
        if [one for several in sums for one in several] != found.sums:
            raise PackedFileError("its memory is damaged")


class _Places:
    """The addresses at which the extents of a file are mapped.

    Args:
        begin: address of the first.
    """

    def __init__(self, extents: list[Extent], begin: int) -> None:
        ends = list(accumulate(padded(one.nbytes) for one in extents))
        news = [begin, *(begin + end for end in ends)]
        self._extents = sorted(zip(extents, news, strict=False), key=lambda one: one[0].address)
        self._olds = [one.address for one, _ in self._extents]

    def new(self, address: int, nbytes: int = 1) -> int:
        """Return where so many bytes are now.

        Raises:
            PackedFileError: they are in none of the extents.
        """
        extent, new = self._extents[max(0, bisect_right(self._olds, address) - 1)]
        offset = address - extent.address
        if not 0 <= offset <= extent.nbytes - nbytes:
            raise PackedFileError("an address leads out of its memory")
        return new + offset

    def structs(self, found: StructsAt) -> int:
        """Return the address of some structs, and move the addresses in them.

        Raises:
            PackedFileError: they are not within the memory, or something in them is not.
        """
        kind = MODEL_STRUCTS.get(found.name)
        if kind is None or found.count < 1:
            raise PackedFileError("its description is of another version")
        size = ctypes.sizeof(kind)
        begin = self.new(found.address, size * found.count)
        offsets = pointers_of(kind)
        for struct_at in range(begin, begin + size * found.count, size):
            for offset in offsets:
                pointer = ctypes.c_uint64.from_address(struct_at + offset)
                if pointer.value:
                    pointer.value = self.new(pointer.value)
        return begin


@cache
def pointers_of(kind: type[ctypes.Structure]) -> tuple[int, ...]:
    """Return the offsets of the addresses in a struct that lead into its arena."""
    return tuple(_pointers(kind))


def _pointers(kind: Any) -> Iterator[int]:
    if kind is ctypes.c_void_p:
        yield 0
    elif issubclass(kind, ctypes.Structure):
        for name, inner in kind._fields_:
            offset = getattr(kind, name).offset
            yield from (offset + inside for inside in _pointers(inner))
    elif issubclass(kind, ctypes.Array):
        for index in range(kind._length_):
            offset = index * ctypes.sizeof(kind._type_)
            yield from (offset + inside for inside in _pointers(kind._type_))


def open_packed(path: Path) -> int:
    """Open a file that this user alone may write; return its descriptor.

    Raises:
        PackedFileError: somebody else may have written it, or it is no regular file.
        OSError: it cannot be opened.
    """
    # Not blocking: opening a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no regular file"
    elif found.st_uid != os.geteuid() or found.st_mode & 0o022:
        problem = "others may have written it"
    else:
        return descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)
    raise PackedFileError(problem)
