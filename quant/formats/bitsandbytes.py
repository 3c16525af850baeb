"""Reads folders that bitsandbytes quantized: NF4 and FP4, unpacked to 16 bits, and int8.

A 4-bit weight W is stored as W (bytes, 1) uint8, first code in the high nibble, with blocks of a
table's values times an `absmax`, which may be 8-bit codes of a table of its own. An int8 weight W
has W.SCB, the largest magnitude of each row, for 127. The layout belongs to the bitsandbytes
project, which stores its tables beside the weights.
"""

from __future__ import annotations

import json
import math
from threading import Lock
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.model_files.checkpoint import SafetensorsFolder

METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_WEIGHT, _ROW_MAXIMA = ".weight", ".SCB"
_INT8_PARTS = (_ROW_MAXIMA, ".weight_format")
MAX_INT8, SIGN = 127, 0x80
UNPACKED = (
    "bitsandbytes' 4-bit weights are held in 16 bits; for 4 bits in memory, quantize the 16-bit"
    " model that they were made from with appliance quantize"
)
FOR_OUTLIERS = "inputs of int8 weights stay in 16 bits, where bitsandbytes rounds all but outliers"


class BitsAndBytesWeights(DenseWeights):
    """Reads a folder of NF4, FP4 or int8 weights, one tensor at a time; other tensors are dense.

    Args:
        folder: its tensors show what is quantized, and how.

    Raises:
        UnsupportedModelError: 4-bit weights without their `quant_state`.
    """

    def __init__(self, folder: SafetensorsFolder) -> None:
        super().__init__(folder)
        self._stored = frozenset(folder.tensor_names())
        self._states = {  # of 4-bit weights, by name
            name.removesuffix(f"{_STATE}{kind}"): name
            for name in self._stored
            for kind in _KINDS
            if name.endswith(f"{_STATE}{kind}")
        }
        self._settings: dict[str, dict[str, Any]] = {}
        self._lock = Lock()
        self._last: tuple[str, Tensor] | None = None
        modules = {
            name.removesuffix(_ROW_MAXIMA) for name in self._stored if name.endswith(_ROW_MAXIMA)
        }
        self._int8 = {name + _WEIGHT for name in modules} & self._stored
        parts = {weight + part for weight in self._states for part in _PARTS}
        parts |= set(self._states.values())
        parts |= {module + part for module in modules for part in _INT8_PARTS}
        self._names = sorted(self._stored - parts)
        bare = (
            name
            for name in self._names
            if name.endswith(_WEIGHT) and name not in self._states and folder.dtype(name) == "uint8"
        )
        if (name := next(bare, None)) is not None:
            raise UnsupportedModelError(
                f"{name} has 4-bit codes of bitsandbytes, but its quant_state is not in the folder,"
                " as in files of old versions; load the model with transformers, call dequantize()"
                " and save it"
            )

    def tensor_names(self) -> list[str]:
        """List every tensor; a quantized weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        if name not in self._states:
            return self._folder.shape(name)
        found = self._state(name).get("shape")
        if not isinstance(found, list) or not all(type(size) is int and size > 0 for size in found):
            raise _damaged(self._states[name], f"shape {found!r}")
        return tuple(found)

    def packed_bits(self, name: str) -> int | None:
        return 8 if name in self._int8 else None

    def group_size(self, name: str) -> int | None:
        return self.shape(name)[1] if name in self._int8 else None

    def notes(self) -> tuple[str, ...]:
        unpacked = (UNPACKED,) if self._states else ()
        return (*unpacked, FOR_OUTLIERS) if self._int8 else unpacked

    def load(self, name: str) -> Tensor | PackedWeight:
        """Read one tensor; a 4-bit one in the 16-bit type that it was quantized from."""
        if name in self._states:
            return self._unpacked(name)
        if name in self._int8:
            maxima = name.removesuffix(_WEIGHT) + _ROW_MAXIMA
            return decode_int8(name, self._folder.load(name), self._folder.load(maxima))
        return self._folder.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows; a 4-bit weight is unpacked for them as a whole."""
        if name in self._states:
            return self._unpacked(name)[start:stop]
        return self._folder.load_rows(name, start, stop)

    def load_part(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """Read some rows of one matrix of a stack; a 4-bit stack is kept unpacked until another."""
        if name not in self._states:
            return super().load_part(name, index, start, stop)
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # two would be in memory
                self._last = name, self._unpacked(name)
            return self._last[1][index][start:stop]

    def _unpacked(self, name: str) -> Tensor:
        state, shape = self._state(name), self.shape(name)
        table = self._part(name, ".quant_map").float().reshape(-1)
        packed = self._folder.load(name).reshape(-1)
        count = math.prod(shape)
        block = state.get("blocksize")
        if type(block) is not int or block < 1 or table.numel() != 16:
            raise _damaged(self._states[name], f"blocks of {block!r} and {table.numel()} values")
        if arrays.dtype_name(packed.dtype) != "uint8" or packed.numel() != -(-count // 2):
            raise _damaged(name, f"{packed.numel()} bytes of codes for {count} weights")
        scales = self._scales(name, state)
        if scales.numel() != -(-count // block) or not arrays.is_finite(scales):
            raise _damaged(
                f"{name}.absmax", f"{scales.numel()} scales, or NaN, for {count} weights"
            )
        codes = arrays.stack((packed >> 4, packed & 0xF), dim=-1).flatten(0)[:count]
        values = table[codes.long()] * arrays.repeated(scales, block, 0)[:count]
        found: Tensor = arrays.cast(values, self._dtype(name, state)).reshape(*shape)
        return found

    def _scales(self, name: str, state: dict[str, Any]) -> Tensor:
        """Return the largest magnitude of each block, float32; they may be codes as well."""
        stored = self._part(name, ".absmax").reshape(-1)
        if f"{name}.nested_absmax" not in self._stored:
            return stored.float()
        table = self._part(name, ".nested_quant_map").float().reshape(-1)
        outer = self._part(name, ".nested_absmax").float().reshape(-1)
        block, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(block) is not int or block < 1 or not isinstance(offset, int | float):
            raise _damaged(self._states[name], f"nested blocks of {block!r} from {offset!r}")
        if table.numel() != 256 or outer.numel() != -(-stored.numel() // block):
            raise _damaged(f"{name}.nested_absmax", f"{outer.numel()} scales")
        repeated = arrays.repeated(outer, block, 0)[: stored.numel()]
        scales: Tensor = table[stored.long()] * repeated + offset
        return scales

    def _state(self, name: str) -> dict[str, Any]:
        """Return the settings that are stored as the bytes of a JSON object."""
        if name not in self._settings:
            stored = self._states[name]
            try:
                found = json.loads(bytes(self._folder.load(stored).reshape(-1).numpy().tobytes()))
            except (ValueError, RecursionError) as error:
                raise _damaged(stored, f"no JSON object ({error})") from error
            if not isinstance(found, dict):
                raise _damaged(stored, f"{found!r}")
            self._settings[name] = found
        return self._settings[name]

    def _dtype(self, name: str, state: dict[str, Any]) -> str:
        dtype = str(state.get("dtype"))
        if dtype not in ("float16", "bfloat16", "float32"):
            raise _damaged(self._states[name], f"type {dtype!r}")
        return dtype

    def _part(self, name: str, part: str) -> Tensor:
        if name + part not in self._stored:
            raise CheckpointError(f"{name + part} is missing, a part of {name}; fetch it again")
        return self._folder.load(name + part)


def decode_int8(name: str, codes: Tensor, maxima: Tensor) -> PackedWeight:
    """Build a weight of w = code * largest magnitude / 127.

    Args:
        codes: (out_features, in_features) int8.
        maxima: (out_features,) float32.

    Raises:
        CheckpointError: types or shapes do not match, or a scale is not finite.
    """
    right = arrays.dtype_name(codes.dtype) == "int8" and codes.dim() == 2
    if not right or tuple(maxima.shape) != (codes.shape[0],) or not arrays.is_finite(maxima):
        raise _damaged(
            name, f"{codes.dtype} of {tuple(codes.shape)} with {tuple(maxima.shape)} in SCB"
        )
    scale = (maxima.float() / MAX_INT8).unsqueeze(1)
    return PackedWeight(
        codes=arrays.viewed(codes.contiguous(), "uint8") ^ SIGN,  # adds 128 to a signed byte
        scale=scale,
        offset=-SIGN * scale,
        offset_kind=OffsetKind.ADDITIVE,
        bits=8,
        group_size=codes.shape[1],
    )


def _damaged(name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has {found}, which is no weight of bitsandbytes; fetch the model again"
    )
