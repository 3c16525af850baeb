"""Reads the header of a GGUF model: metadata, and the place of each tensor in its files.

A header is untrusted. Every count is checked against the remaining bytes before anything is
allocated for it, and every tensor must lie inside its file, after the one before. Imports neither
torch nor numpy.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from appliance.errors import CheckpointError
from appliance.files import FileIdentity, open_regular, unreadable
from appliance.gguf.ollama import as_llama_cpp
from appliance.gguf.types import TENSOR_TYPES, TensorType, check_readable, unknown_type
from appliance.model_files.gguf_names import parts_of

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
VOCABULARY = "tokenizer."  # how keys begin whose arrays only a tokenizer reads
MAX_KEY_BYTES = 65535  # the format's limit
MAX_ARRAY_LENGTH = 1 << 24  # the largest vocabularies have under 2 ** 19 entries
MAX_ARRAY_NESTING = 3
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_MIN_ENTRY_BYTES = 8 + 4 + 1  # a metadata entry: length of its key, type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of its name, dimensions, type, offset

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_AGAIN = "download it again"
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive or PyTorch file", "give a GGUF file"),
    b"ggjt": ("a GGML file from before GGUF", "use a file of today's converters"),
    b"vers": ("a Git LFS pointer, not the file itself", "fetch the file with `git lfs pull`"),
    b"<!DO": ("a web page", _AGAIN),
    b"<htm": ("a web page", _AGAIN),
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file with tensor data, as it was when its header was read."""

    path: Path
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. The shape is in torch's order: (out_features, in_features)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # bytes from the start of the file
    nbytes: int
    file: DataFile

    def part(self, index: int) -> TensorInfo:
        """Return one of the tensors that are stacked along the first dimension."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])

    def rows(self, start: int, stop: int) -> TensorInfo:
        """Return some rows of the tensor, along its first dimension."""
        row_bytes = self.nbytes // self.shape[0]
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
        )


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything in a GGUF model before its tensor data.

    Attributes:
        files: its parts in order, the first of which has the metadata.
    """

    files: tuple[DataFile, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def starts_as_gguf(path: Path) -> bool:
    """Return True for a file that begins as GGUF does, as Ollama's do under names of their own."""
    try:
        with open_regular(path) as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path, *, vocabulary: bool = True) -> GGUFHeader:
    """Read and check the header of a GGUF model, under llama.cpp's names.

    Args:
        path: its file, or any part of a model that is split over several.
        vocabulary: keep the tokenizer's arrays, which take up to 40 MB.

    Raises:
        CheckpointError: a file is empty, cut, inconsistent or no GGUF file, or a part is missing.
        UnsupportedModelError: a tensor type that is not read.
    """
    files = parts_of(path)
    headers = [read_part(one, vocabulary=vocabulary) for one in files]
    counts = [header.metadata.get("split.count", 0) or 1 for header in headers]
    if any(count != len(files) for count in counts):
        raise _not_of(
            path, f"their headers count {counts[0]!r:.40} parts, and the name {len(files)}"
        )
    if len(files) == 1:
        return as_llama_cpp(headers[0])
    numbers = [header.metadata.get("split.no") for header in headers]
    if numbers != list(range(len(files))):
        raise _not_of(path, f"their headers have the numbers {numbers!r:.80}")
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    stored = sum(len(header.tensors) for header in headers)
    if not stored == len(tensors) == expected:
        raise _not_of(
            path,
            f"they hold {stored} tensors, {len(tensors)} of them once: the first says"
            f" {expected!r:.40}",
        )
    first = headers[0]
    data_files = tuple(file for header in headers for file in header.files)
    return replace(first, files=data_files, tensors=tensors)


def _not_of(path: Path, reason: str) -> CheckpointError:
    first, *others = parts_of(path)
    named = f"{first} and the {len(others)} parts beside it are" if others else f"{first} is"
    return CheckpointError(
        f"{named} no whole model: {reason}; put all parts of one model into one folder under the"
        " names that they were made with, as NAME-00001-of-00003.gguf"
    )


def read_part(path: Path, *, vocabulary: bool = True) -> GGUFHeader:
    """Read the header of one file, whole model or not; arguments and errors as `read_header`."""
    parts = parts_of(path)
    if len(parts) > 1 and not path.exists():
        there = sum(part.exists() for part in parts)
        raise CheckpointError(
            f"{path} is missing, a part of a model of which {there} of {len(parts)} files are in "
            "that folder; put it there too"
        )
    file = DataFile(path, FileIdentity.of(path))
    try:
        with open_regular(path) as content:
            return _HeaderReader(content, file, vocabulary).read()
    except OSError as error:
        raise unreadable(path, error) from error


class _HeaderReader:
    """Reads forward through the header and counts the remaining bytes."""

    def __init__(self, content: BinaryIO, file: DataFile, vocabulary: bool) -> None:
        self._read = content.read
        self._file = file
        self._path = file.path
        self._identity = file.identity
        self._left = file.identity.size
        self._vocabulary = vocabulary

    def read(self) -> GGUFHeader:
        version = self._version()
        num_tensors, num_entries = self._u64(), self._u64()
        if num_entries * _MIN_ENTRY_BYTES + num_tensors * _MIN_TENSOR_BYTES > self._left:
            self._fail(
                f"its header announces {num_tensors} tensors and {num_entries} metadata entries, "
                f"more than fit into {self._left} bytes"
            )
        metadata = self._metadata(num_entries)
        tensors = self._tensors(num_tensors, self._alignment(metadata))
        return GGUFHeader((self._file,), version, metadata, tensors)

    def _version(self) -> int:
        if self._left == 0:
            self._fail("it is empty")
        magic = self._take(4)
        if magic != MAGIC:
            usual = (f"something else (it starts with {magic!r})", _AGAIN)
            what, advice = _FOREIGN.get(magic, usual)
            self._fail(f"it is {what}", advice)
        version = self._u32()
        if version not in VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            self._fail(
                f"it is {kind}, and versions 2 and 3 in little-endian order are read",
                "convert the model anew",
            )
        return version

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string(MAX_KEY_BYTES)
            if key in metadata:
                self._fail(f"metadata key {key!r} occurs twice")
            kept = self._vocabulary or not key.startswith(VOCABULARY)
            value = self._value(self._u32(), nesting=0, kept=kept)
            if kept or not isinstance(value, list):
                metadata[key] = value
        return metadata

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in {1 << bit for bit in range(17)}:
            self._fail(f"its alignment is {alignment!r}, not a power of two up to 65536")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        relative: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self._tensor_info()
            if info.name in relative:
                self._fail(f"tensor {info.name!r} occurs twice")
            relative[info.name] = info

        data_start = _align(self._identity.size - self._left, alignment)
        expected = 0  # tensors follow one another, padded to the alignment
        for info in sorted(relative.values(), key=lambda info: info.offset):
            if info.offset != expected:
                self._fail(
                    f"tensor {info.name!r} lies at byte {info.offset} of the data, "
                    f"not at {expected}, where the one before it ends"
                )
            end = data_start + info.offset + info.nbytes
            if end > self._identity.size:
                self._fail(
                    f"tensor {info.name!r} ends at byte {end}, "
                    f"but the file has only {self._identity.size} bytes"
                )
            expected = _align(info.offset + info.nbytes, alignment)
        return {
            info.name: replace(info, offset=data_start + info.offset) for info in relative.values()
        }

    def _tensor_info(self) -> TensorInfo:
        name = self._string(MAX_KEY_BYTES)
        num_dimensions = self._u32()
        if num_dimensions > MAX_DIMENSIONS:
            self._fail(f"tensor {name!r} has {num_dimensions} dimensions")
        sizes = [self._u64() for _ in range(num_dimensions)] or [1]  # fastest first
        type_number, offset = self._u32(), self._u64()
        if type_number not in TENSOR_TYPES:
            raise unknown_type(self._path, name, type_number)
        kind = TENSOR_TYPES[type_number]
        if 0 in sizes or sizes[0] % kind.block_size:
            self._fail(f"tensor {name!r} of type {kind.name} has the impossible shape {sizes}")
        nbytes = math.prod(sizes) // kind.block_size * kind.block_bytes
        info = TensorInfo(name, tuple(reversed(sizes)), kind, offset, nbytes, self._file)
        check_readable(self._path, info)
        return info

    def _value(self, type_number: int, nesting: int, kept: bool) -> Any:
        if type_number == _STRING:
            return self._string(self._left)
        if type_number == _ARRAY:
            return self._array(nesting + 1, kept)
        return self._scalar(type_number).unpack(self._take(self._scalar(type_number).size))[0]

    def _array(self, nesting: int, kept: bool) -> list[Any]:
        """Read an array; one that is not kept is passed over and comes out empty."""
        if nesting > MAX_ARRAY_NESTING:
            self._fail(f"its metadata nests arrays more than {MAX_ARRAY_NESTING} deep")
        type_number, count = self._u32(), self._u64()
        if type_number == _STRING:
            self._check_length(count, 8)
            return self._strings(count, kept)
        if type_number == _ARRAY:
            self._check_length(count, 12)
            return [self._array(nesting + 1, kept) for _ in range(count)]
        scalar = self._scalar(type_number)
        self._check_length(count, scalar.size)
        content = self._take(count * scalar.size)
        return [value for (value,) in scalar.iter_unpack(content)] if kept else []

    def _strings(self, count: int, kept: bool) -> list[str]:
        # A vocabulary has a quarter of a million of these, so this loop avoids `_string`.
        read, length_of = self._read, _U64.unpack
        strings, left = [], self._left
        try:
            for _ in range(count):
                (length,) = length_of(read(8))
                left -= 8 + length
                if left < 0:
                    self._fail_cut()
                content = read(length)
                if kept:
                    strings.append(content.decode())
        except UnicodeDecodeError:
            self._fail("its metadata holds text that is not UTF-8")
        except struct.error:
            self._fail_cut()
        self._left = left
        return strings

    def _string(self, limit: int) -> str:
        length = self._u64()
        if length > limit:
            self._fail(f"its header announces a string of {length} bytes where {limit} are left")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._fail("its metadata holds text that is not UTF-8")

    def _scalar(self, type_number: int) -> struct.Struct:
        if type_number not in _SCALARS:
            self._fail(f"its metadata holds a value of the unknown type {type_number}")
        return _SCALARS[type_number]

    def _check_length(self, count: int, element_bytes: int) -> None:
        if count * element_bytes > self._left or count > MAX_ARRAY_LENGTH:
            self._fail(
                f"its metadata announces {count} values in an array where {self._left} bytes follow"
            )

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _take(self, count: int) -> bytes:
        if count > self._left:
            self._fail_cut()
        self._left -= count
        data = self._read(count)
        if len(data) != count:
            self._fail_cut()
        return data

    def _fail_cut(self) -> NoReturn:
        self._fail(f"it is cut off inside its header, at {self._identity.size} bytes")

    def _fail(self, reason: str, advice: str = _AGAIN) -> NoReturn:
        raise CheckpointError(f"{self._path} is no usable GGUF file: {reason}; {advice}")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
