"""Reads Hugging Face folders, config.json and safetensors, and checks them first.

Never unpickles or runs anything that a folder contains. Knows no model family.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import (
    FileIdentity,
    read_into,
    read_json,
    refuse_stand_in,
    replace_atomically,
    write_json,
)
from appliance.kernels import arrays
from appliance.model_files.other_forms import form_of_folder, kind_of_folder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SafetensorsFolder", "read_config", "write_json", "write_safetensors"]

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
COMPARED_BYTES = 1 << 20  # of two tensors at once
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
QUANTIZATION = "quantization_config"
# Files of other projects that hold settings which config.json lacks, and the method they belong to.
_SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
}

# A part of several, or weights that are no whole model.
_OTHER_WEIGHTS = re.compile(r"-of-\d+|^adapter|^consolidated|^model-\d+\.")

_SHARD = re.compile(r"((?!adapter|consolidated).*)-\d{5}-of-(\d{5})\.safetensors")

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "U32": "uint32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor's place in a file; `start` counts bytes from the beginning."""

    file: Path
    identity: FileIdentity
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFolder:
    """A folder with config.json and weights in one safetensors file or in indexed shards.

    Args:
        in_torch: return torch tensors; otherwise `HostArray`.

    Raises:
        CheckpointError: a file is missing, truncated or inconsistent, or the weights are pickled.
        UnsupportedModelError: an element type is unknown.
    """

    def __init__(self, path: Path, *, in_torch: bool = True) -> None:
        self.path = path
        self.in_torch = in_torch
        self.config = read_config(path)
        if "auto_map" in self.config:
            logger.warning("%s: auto_map is ignored; code from a checkpoint is never run", path)
        self._entries: dict[str, _Entry] = {}
        for shard in _weight_files(path):
            for name, entry in _read_header(shard).items():
                if name in self._entries:
                    other = self._entries[name].file.name
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is in both {other} and {shard.name}; "
                        "download the folder again"
                    )
                self._entries[name] = entry
        _check_index(path, self._entries)

    def tensor_names(self) -> list[str]:
        """List all tensors in file order."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Return a tensor's element type, such as "bfloat16"."""
        return self._entries[name].dtype

    def has_same_bytes(self, one: str, other: str) -> bool:
        """Compare two tensors of one type and shape, up to the first part that differs.

        Raises:
            CheckpointError: the file has changed.
        """
        first, second = self._entries[one], self._entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        buffers = bytearray(COMPARED_BYTES), bytearray(COMPARED_BYTES)
        for start in range(0, first.nbytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, first.nbytes - start)
            views = [memoryview(buffer)[:size] for buffer in buffers]
            for entry, view in zip((first, second), views, strict=True):
                read_into(entry.file, entry.identity, entry.start + start, view)
            if views[0] != views[1]:
                return False
        return True

    def load(self, name: str) -> Tensor:
        """Read one tensor; raise CheckpointError if the file has changed."""
        return self.load_rows(name, 0, self.shape(name)[0] if self.shape(name) else 1)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of a tensor; a scalar has one row. Raises as `load`."""
        return self._read_rows(self._entries[name], start, stop)

    def load_part(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """Read rows of one matrix of a stack (num_matrices, rows, columns). Raises as `load`."""
        entry = self._entries[name]
        count, rows, columns = entry.shape
        flat = replace(entry, shape=(count * rows, columns))
        return self._read_rows(flat, index * rows + start, index * rows + stop)

    def _read_rows(self, entry: _Entry, start: int, stop: int) -> Tensor:
        row_bytes = (
            entry.nbytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.nbytes
        )
        raw = np.empty(row_bytes * (stop - start), dtype=np.uint8)
        read_into(entry.file, entry.identity, entry.start + start * row_bytes, raw.data)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        found: Tensor = arrays.of_numpy(raw).view(entry.dtype).reshape(shape)
        return arrays.in_torch(found) if self.in_torch else found


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, with quantization settings under `quantization_config`, wherever they are.

    The first that is there wins, in vLLM's order: `quantization_config`, that of `text_config`,
    `compression_config`, MLX's `quantization`, then a file of GPTQ's, AWQ's or ModelOpt's. Where
    they name no method, the key `quant_method` is added.

    Raises:
        CheckpointError: a file is missing or no JSON object, or the folder is of another kind.
    """
    if (why := kind_of_folder(path)) is not None:
        raise UnsupportedModelError(why)
    config = read_json(path / CONFIG_NAME)
    text = config.get("text_config")
    places = (
        (config, QUANTIZATION),
        (text if isinstance(text, dict) else {}, QUANTIZATION),
        (config, "compression_config"),
        (config, "quantization"),
    )
    found = next((place[key] for place, key in places if place.get(key) is not None), None)
    method = None
    if found is None:
        name = next((name for name in _SETTINGS_FILES if (path / name).is_file()), None)
        if name is None:
            return config
        found, method = read_json(path / name), _SETTINGS_FILES[name]
    if not isinstance(found, dict):
        return config | {QUANTIZATION: found}
    nested = found.get("quantization")  # of ModelOpt, beside the producer
    found = (nested if isinstance(nested, dict) else {}) | found
    if not found.get("quant_method") and (method := method or _unnamed_method(found)):
        found = found | {"quant_method": method}
    return config | {QUANTIZATION: found}


def _unnamed_method(settings: Mapping[str, Any]) -> str | None:
    """Name the method of settings without `quant_method` by the keys that only it has."""
    if "quant_algo" in settings:
        return "modelopt"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if "config_groups" in settings:
        return "compressed-tensors"
    return "mlx" if settings.keys() >= {"bits", "group_size"} else None


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file atomically.

    Raises:
        CheckpointError: writing failed, for example because the disk is full.
    """
    import safetensors
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        with replace_atomically(path) as temporary:
            save_file(contiguous, temporary, {"format": "pt", **(metadata or {})})
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS_NAME).is_file():
        return [path / WEIGHTS_NAME]
    if (path / INDEX_NAME).is_file():
        shards = sorted(set(_weight_map(path).values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path / INDEX_NAME} names {shard!r}, which is no shard; download it again"
                )
            if not (path / shard).is_file():
                raise CheckpointError(f"{path}: shard {shard} is missing; download it again")
        return [path / shard for shard in shards]
    loose = [file for file in path.iterdir() if file.suffix == ".safetensors"]
    if len(loose) == 1 and not _OTHER_WEIGHTS.search(loose[0].name):
        return loose  # as AutoGPTQ named it: gptq_model-4bit-128g.safetensors
    if numbered := _numbered(path, loose):
        return numbered
    if loose:
        named = ", ".join(sorted(file.name for file in loose)[:8])
        raise CheckpointError(
            f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}, which would say whether these are"
            f" parts of one model: {named}; fetch the index, or give each model a folder of its own"
        )
    if (form := form_of_folder(path)) is not None:
        raise CheckpointError(f"{path} holds {form[0]}; {form[1]}")
    raise CheckpointError(
        f"{path} holds no weights; download {WEIGHTS_NAME}, or {INDEX_NAME} and all that it names"
    )


def _numbered(path: Path, files: list[Path]) -> list[Path]:
    """Return shards whose names tell, without an index, that they are one whole model.

    Raises:
        CheckpointError: a number is missing.
    """
    places = {file.name: _SHARD.fullmatch(file.name) for file in files}
    stems = {(place[1], place[2]) for place in places.values() if place}
    if len(stems) != 1:
        return []
    ((stem, count),) = stems
    shards = [f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
    missing = next((shard for shard in shards if shard not in places), None)
    if missing is not None:
        raise CheckpointError(f"{path}: shard {missing} is missing; download it again")
    return [path / shard for shard in shards]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise CheckpointError(f"{path / INDEX_NAME} has no usable weight_map; download it again")
    return weight_map


def _check_index(path: Path, entries: Mapping[str, _Entry]) -> None:
    if not (path / INDEX_NAME).is_file() or (path / WEIGHTS_NAME).is_file():
        return
    for name, shard in _weight_map(path).items():
        if name not in entries or entries[name].file.name != shard:
            raise CheckpointError(
                f"{path}: tensor {name!r} is not in {shard}, where {INDEX_NAME} says it is; "
                "download the folder again"
            )


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read the entries of a safetensors file: 8 bytes of length, a JSON header, then the data."""
    identity = FileIdentity.of(path)
    if identity.size < 8:
        _refuse(path, f"it has only {identity.size} bytes")
    prefix = bytearray(8)
    read_into(path, identity, 0, memoryview(prefix))
    refuse_stand_in(path, bytes(prefix))
    (length,) = struct.unpack("<Q", prefix)
    if length > min(identity.size - 8, MAX_HEADER_BYTES):
        _refuse(path, f"its header of {length} bytes does not fit into its {identity.size} bytes")
    header = bytearray(length)
    read_into(path, identity, 8, memoryview(header))
    try:
        fields = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not valid JSON: {error}")
    if not isinstance(fields, dict):
        _refuse(path, "its header is not a JSON object")
    data_start = 8 + length
    entries = {
        name: _entry(path, identity, data_start, name, field)
        for name, field in fields.items()
        if name != "__metadata__"
    }
    _check_extents(path, identity.size, data_start, entries)
    return entries


def _entry(path: Path, identity: FileIdentity, data_start: int, name: str, field: Any) -> _Entry:
    match field:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            _refuse(path, f"the entry of tensor {name!r} is incomplete")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"tensor {name!r} of {path} has type {dtype}; supported are {', '.join(_DTYPES)}"
        )
    if not all(type(size) is int and size >= 0 for size in shape):
        _refuse(path, f"tensor {name!r} has the impossible shape {shape}")
    nbytes = math.prod(shape) * arrays.numpy_dtype(_DTYPES[dtype]).itemsize
    if end - start != nbytes:
        _refuse(path, f"tensor {name!r} of shape {shape} needs {nbytes} bytes, not {end - start}")
    return _Entry(path, identity, _DTYPES[dtype], tuple(shape), data_start + start, nbytes)


def _check_extents(path: Path, size: int, data_start: int, entries: Mapping[str, _Entry]) -> None:
    expected = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != expected:
            _refuse(path, f"tensor {name!r} starts at byte {entry.start}, not at {expected}")
        expected += entry.nbytes
    if expected != size:
        _refuse(path, f"its tensors end at byte {expected}, but it has {size} bytes")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} is no usable safetensors file: {reason}; download it again")
