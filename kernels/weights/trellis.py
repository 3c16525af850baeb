"""A weight whose codes are symbols of a trellis: 2 to 5 bits, and less loss than separate codes.

The values of a symbol depend on the symbols before it, so that a few tables hold a code of 12 bits
(Marcellin and Fischer's trellis-coded quantization, 1990; of weights: QTIP, arXiv:2406.11235).
Ours is decoded by byte lookups: a value is the sum of three table entries, four with 3 bits. Inputs
are rotated in blocks of 64, which makes a row's weights nearly normal, as the tables expect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64  # outputs of a sequence; inputs that are rotated together
BITS = (2, 3, 4, 5)
STATE_BITS = 12
# By bits: the tables, fitted to normal numbers by coding and least squares in turns, 25 to 50 times
# from other first values, the best kept. trellis.h has the same numbers.
# fmt: off
TABLES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: (
        (49, -34, 19, -1, -20, -20, -11, 38, 21, -48, 21, -1, 14, -15, -12, 0),
        (13, 21, -12, -5, -6, 6, 2, -18, -17, -26, 24, 7, 14, -6, 23, -19),
        (8, -21, -46, -15, -26, 1, 10, -35, -7, 33, 28, 6, 44, 8, -17, 30),
    ),
    3: (
        (-8, 5, -14, 18, 53, 26, -53, -29),
        (-23, -8, -2, -3, 1, 13, 13, 7),
        (8, 26, -23, -3, 5, -15, -8, 7),
        (-6, 8, 25, 15, -4, -27, 6, -18),
    ),
    4: (
        (-3, 65, 19, 44, -8, -33, -18, -65, -42, 14, 9, 33, -25, 26, 4, -13),
        (8, -16, 10, -1, 15, 30, 8, -5, 0, -29, -18, -6, -13, 22, 2, -8),
        (-9, 2, 30, -21, 0, 8, 15, 2, -18, 9, -30, -5, 12, 19, -15, -5),
    ),
    5: (
        (63, 12, -62, -18, -41, -32, -3, 41, 7, 2, 17, -13, -8, -24, 33, 24),
        (-10, 5, 4, 18, -8, -5, 29, -19, 14, 8, -4, 1, -14, -27, 12, -1),
        (2, 16, 5, -9, -4, 29, -19, 2, -14, -1, 20, 8, -9, -5, 12, -29),
    ),
}
# fmt: on
UNIT = {2: 36.0, 3: 34.0, 4: 36.0, 5: 36.0}  # values of standard deviation 1
SIGNS = np.array(
    [-1.0 if 0x5B1D9C7E30A6F842 >> i & 1 else 1.0 for i in range(BLOCK)], dtype=np.float32
)
DECODE_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class TrellisWeight:
    """One linear weight of shape (out_features, in_features).

    Output o of a block, in rotated inputs, is the table values of its symbols times its scale. The
    symbols of 64 outputs are a closed sequence for each input: the last ones precede the first.

    Attributes:
        symbols: (blocks, in_features, 8 * bits) uint8: the symbols of 64 outputs, the first in the
            lowest bits.
        scale: (out_features,) float16, bfloat16 or float32; the last block may have more outputs.
    """

    symbols: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        assert arrays.dtype_name(self.symbols.dtype) == "uint8", self.symbols.dtype
        assert self.bits in BITS, self.symbols.shape
        assert self.symbols.shape[2] == 8 * self.bits, self.symbols.shape
        assert self.symbols.shape[1] % BLOCK == 0, self.symbols.shape
        assert self.symbols.shape[0] == -(-self.scale.shape[0] // BLOCK), self.scale.shape

    @property
    def bits(self) -> int:
        """Bits of a symbol."""
        return int(self.symbols.shape[2]) // 8

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.scale.shape[0], self.symbols.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of symbols and scales."""
        return self.symbols.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> TrellisWeight:
        return TrellisWeight(self.symbols.to(device), self.scale.to(device))

    def whole_rows(self, rows: slice) -> TrellisWeight | None:
        """Select whole blocks of outputs, without loss; None if the range cuts one."""
        first, last, step = rows.indices(self.shape[0])
        if step != 1 or first % BLOCK or (last % BLOCK and last != self.shape[0]):
            return None
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        return TrellisWeight(self.symbols[blocks], self.scale[first:last])

    @property
    def column_unit(self) -> int:
        """Inputs between places where `columns` may cut."""
        return BLOCK

    def columns(self, first: int, last: int) -> TrellisWeight:
        """Select inputs, whole blocks, without loss."""
        assert first % BLOCK == 0, first
        assert last % BLOCK == 0, last
        return replace(self, symbols=self.symbols[:, first:last].contiguous())

    def is_finite(self) -> bool:
        """Return True if no scale is NaN or infinite."""
        return arrays.is_finite(self.scale)

    def stacks_with(self, other: TrellisWeight) -> bool:
        """Return True if `concatenate` takes both, this one above."""
        same = (self.bits, self.shape[1]) == (other.bits, other.shape[1])
        same = same and self.scale.dtype == other.scale.dtype
        return same and self.shape[0] % BLOCK == 0

    @staticmethod
    def concatenate(parts: list[TrellisWeight]) -> TrellisWeight:
        """Stack weights along the output dimension, as for a fused q/k/v."""
        assert all(part.stacks_with(after) for part, after in pairwise(parts))
        return TrellisWeight(
            arrays.cat([part.symbols for part in parts]), arrays.cat([part.scale for part in parts])
        )

    def dequantize(self, dtype: Any = "float32", rows: arrays.Rows = slice(None)) -> Tensor:
        """Return weights (out_features, in_features), computed in float32, then cast.

        Args:
            rows: outputs to return, a range or indices (num_rows,).
        """
        index: Any = rows
        if isinstance(rows, slice):
            index = arrays.like(self.symbols, np.arange(self.shape[0])[rows])
        out: Tensor = arrays.empty((len(index), self.shape[1]), dtype, self.symbols)
        scale = self.scale.float()
        step = max(1, DECODE_AT_ONCE // self.shape[1])
        for start in range(0, len(index), step):
            some = index[start : start + step]
            blocks, places = np.unique(_numpy(some) // BLOCK, return_inverse=True)
            values = decoded(self.symbols[arrays.like(self.symbols, blocks)])
            picked = values[arrays.like(some, places), :, some % BLOCK].float()
            weights = rotated_back(picked) * scale[some].unsqueeze(-1)
            out[start : start + step] = arrays.cast(weights, dtype)
        return out


def _numpy(array: Any) -> np.ndarray[Any, Any]:
    return array.numpy() if isinstance(array, arrays.HostArray) else np.asarray(array.cpu())


def symbols_of(packed: Any) -> Any:
    """Return the symbols of `TrellisWeight.symbols`, (blocks, in_features, BLOCK) int32."""
    bits = int(packed.shape[-1]) // 8
    at = np.arange(BLOCK) * bits
    low = packed[..., arrays.like(packed, at // 8)].int()
    high = packed[..., arrays.like(packed, np.minimum(at // 8 + 1, 8 * bits - 1))].int()
    shift = arrays.like(packed, (at % 8).astype(np.int32))
    return ((low | high << 8) >> shift) & ((1 << bits) - 1)


def decoded(symbols: Any) -> Any:
    """Return the table values of symbols (blocks, in_features, 8 * bits): (..., BLOCK) int32."""
    bits = int(symbols.shape[-1]) // 8
    now = symbols_of(symbols)
    last = -(-STATE_BITS // bits)
    around = arrays.cat((now[..., BLOCK - last :], now), dim=-1)
    before = [around[..., last - i : last - i + BLOCK] for i in range(last + 1)]
    places = places_of(before, bits)
    total = 0
    for table, place in zip(TABLES[bits], places, strict=True):
        total = total + arrays.like(symbols, np.array(table, dtype=np.int32))[place.long()]
    return total


def places_of(symbols: Any, bits: int) -> tuple[Any, ...]:
    """Return the place in each table.

    Args:
        symbols: a symbol, the one before it, and so on, for 12 bits or more.
    """
    c = symbols
    if bits == 2:
        pairs = [c[i] | c[i + 1] << 2 for i in range(5)]
        return pairs[0], pairs[2] ^ pairs[1], pairs[4] ^ pairs[0]
    if bits == 5:
        return c[0] & 15, c[1] & 15, c[0] >> 4 | c[1] >> 4 << 1 | (c[2] & 3) << 2
    return tuple(c[i] for i in range(STATE_BITS // bits))


def rotated(x: Any) -> Any:
    """Rotate inputs (..., in_features): signs, then a Hadamard transform of blocks of 64."""
    return _transformed(_blocks(x) * arrays.like(x, SIGNS)).reshape(x.shape)


def rotated_back(x: Any) -> Any:
    """Undo `rotated`."""
    return (_transformed(_blocks(x)) * arrays.like(x, SIGNS)).reshape(x.shape)


def _blocks(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _transformed(x: Any) -> Any:
    return x @ arrays.like(x, HADAMARD)


def _hadamard() -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.ones((1, 1), dtype=np.float32)
    while len(found) < BLOCK:
        found = np.block([[found, found], [found, -found]])
    return found / np.float32(BLOCK**0.5)


HADAMARD = _hadamard()
