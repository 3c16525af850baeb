"""Unpacks the blocks of GGUF files that kernels do not multiply as they are, without loss.

IQ1 to IQ3 store 4 or 8 weights as a place in a grid and, most of them, a byte of signs: each weight
gets a code of its own, see `_three_bits` and `_four_bits` of `ggml_types`. Ternary weights, -d, 0
and d, become codes 0 to 2 of Q2_K, whose scale and minimum are d. Layouts are those of llama.cpp's
ggml-common.h; grids and signs are the `gguf` package's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.gguf.types import SUPERBLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Octets = NDArray[np.uint8]

_ONE = np.float16(1).tobytes()
_SEVENS = np.array([0, 7, 14, 21], dtype=np.uint32)
_THREES = np.array([0, 3, 6, 9], dtype=np.uint16)
_EACH_BIT = np.arange(8, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of some blocks.

    Attributes:
        d: (blocks, 2) uint8, the bytes of a float16.
        integers: (blocks, groups) below 16: a group's scale is (2 * integer + 1) * d / 8.
        places: (blocks, 32) in a grid of 8 weights, or (blocks, 64) in one of 4.
        signs: (blocks, 32) uint8, uppermost bits of the codes of 8 weights, the first lowest.
    """

    d: Octets
    integers: NDArray[Any]
    places: NDArray[Any]
    signs: Octets


def unpacked(type_name: str, blocks: Octets) -> Octets:
    """Unpack (blocks, bytes of a block), to as many blocks of the held type."""
    if type_name in _TERNARY:
        return _q2_k(*_TERNARY[type_name](blocks))
    parts = _PARTS[type_name](np.ascontiguousarray(blocks))
    bits = 4 if type_name.startswith("IQ3") else 3
    magnitudes = _grid(type_name)[parts.places].reshape(len(blocks), SUPERBLOCK)
    codes = magnitudes | (_spread()[parts.signs] << np.uint8(bits - 1)).reshape(magnitudes.shape)
    nibbles = parts.integers.astype(np.uint8)
    scales = _joined((nibbles[:, ::2], nibbles[:, 1::2]), 4)
    planes = (_nibbles(codes),) if bits == 4 else (_bits(codes >> 2), _pairs(codes & 3))
    return np.concatenate((parts.d, scales, *planes), axis=1)


def _nibbles(codes: Octets) -> Octets:
    """Pack runs of 16: of each two the first in the low nibbles."""
    runs = codes.reshape(len(codes), 8, 2, 16)
    return _joined((runs[:, :, 0], runs[:, :, 1]), 4).reshape(len(codes), -1)


def _pairs(codes: Octets) -> Octets:
    """Pack four runs of 32 in each 32 bytes, the first lowest."""
    runs = codes.reshape(len(codes), 2, 4, 32)
    return _joined([runs[:, :, i] for i in range(4)], 2).reshape(len(codes), -1)


def _joined(parts: Sequence[Octets], bits: int) -> Octets:
    """Join parts below 2 ** bits, the first lowest."""
    found = parts[0].copy()
    for place, part in enumerate(parts[1:], 1):
        found |= np.left_shift(part, bits * place, dtype=np.uint8)
    return found


def _bits(bits: Octets) -> Octets:
    """Pack eight runs of 32, the first lowest."""
    return np.packbits(bits.reshape(len(bits), 8, 32), axis=1, bitorder="little")[:, 0]


@cache
def _spread() -> Octets:
    """Return the bits of each byte, (256, 8)."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


@cache
def _grid(type_name: str) -> Octets:
    """Return a grid's weights as places in its ascending values, (places, 4 or 8)."""
    kind = _gguf_type("IQ1_S" if type_name == "IQ1_M" else type_name)
    kind.init_grid()
    values = kind.grid.reshape(-1, kind.grid_shape[1])
    places: Octets = np.searchsorted(kind.grid_map, values).astype(np.uint8)
    return places


@cache
def _signs_of_seven() -> Octets:
    """Return the byte of signs that 7 bits stand for, (128,): an even number of bits."""
    return np.frombuffer(_gguf_type("IQ2_XXS").ksigns, dtype=np.uint8)


def _gguf_type(name: str) -> Any:
    # Imported late: other types do not need it, and it takes a quarter of a second.
    from gguf import quants

    return getattr(quants, name)


def _halves_of(octets: Octets) -> NDArray[np.uint16]:
    return np.ascontiguousarray(octets).view("<u2")


def _words_of(octets: Octets) -> NDArray[np.uint32]:
    return np.ascontiguousarray(octets).view("<u4")


def _nibbles_of(octets: Octets) -> Octets:
    """Split (blocks, n) into (blocks, 2 n), the lower nibble first."""
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(octets), -1)


def _signs_of_words(words: NDArray[np.uint32]) -> Octets:
    """Return four bytes of signs for each word, which has 7 bits of each."""
    signs: Octets = _signs_of_seven()[words[..., None] >> _SEVENS & 127]
    return signs.reshape(len(words), -1)


def _iq2_xxs(blocks: Octets) -> _Parts:
    """Split a d, then for 32 weights each four bytes of places and a word of signs and scale."""
    words = _words_of(blocks[:, 2:]).reshape(len(blocks), 8, 2)
    places = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return _Parts(blocks[:, :2], words[..., 1] >> 28, places, _signs_of_words(words[..., 1]))


def _iq2_xs(blocks: Octets) -> _Parts:
    """Split a d, places of 9 bits below 7 of signs, nibbles of scales."""
    both = _halves_of(blocks[:, 2:66])
    signs = _signs_of_seven()[both >> 9]
    return _Parts(blocks[:, :2], _nibbles_of(blocks[:, 66:]), both & 511, signs)


def _iq2_s(blocks: Octets) -> _Parts:
    """Split a d, low bytes of places, signs, pairs of the places' high bits, nibbles of scales."""
    high = blocks[:, 66:74, None] >> _EACH_BIT[::2] & 3
    places = blocks[:, 2:34] | high.reshape(len(blocks), -1).astype(np.uint16) << 8
    return _Parts(blocks[:, :2], _nibbles_of(blocks[:, 74:]), places, blocks[:, 34:66])


def _iq3_xxs(blocks: Octets) -> _Parts:
    """Split a d, places of 4 weights, and for 32 weights each a word of signs and scale."""
    words = _words_of(blocks[:, 66:])
    return _Parts(blocks[:, :2], words >> 28, blocks[:, 2:66], _signs_of_words(words))


def _iq3_s(blocks: Octets) -> _Parts:
    """Split a d, low bytes of places of 4 weights, their ninth bits, signs, nibbles of scales."""
    high = _spread()[blocks[:, 66:74]].reshape(len(blocks), -1)
    places = blocks[:, 2:66] | high.astype(np.uint16) << 8
    return _Parts(blocks[:, :2], _nibbles_of(blocks[:, 106:]), places, blocks[:, 74:106])


def _iq1_s(blocks: Octets) -> _Parts:
    """Split a d, low bytes of places, and for 32 weights each three high bits of four places."""
    halves = _halves_of(blocks[:, 34:])  # and a scale of 3 bits, and whether values are lowered
    high = (halves[..., None] >> _THREES & 7).reshape(len(blocks), -1)
    lowered = np.repeat((halves >> 15).astype(np.uint8) * 255, 4, axis=1)
    return _Parts(blocks[:, :2], halves >> 12 & 7, blocks[:, 2:34] | high << 8, lowered)


def _iq1_m(blocks: Octets) -> _Parts:
    """Split low bytes of places, nibbles for each, and four halves of four scales of 3 bits."""
    high = _nibbles_of(blocks[:, 32:48]).astype(np.uint16)  # a place's, and if values are lowered
    halves = _halves_of(blocks[:, 48:])  # above the scales a nibble of d
    d = halves[:, 0] >> 12 | halves[:, 1] >> 8 & 0xF0 | halves[:, 2] >> 4 & 0xF00
    d = (d | halves[:, 3] & 0xF000).astype("<u2")
    integers = (halves[..., None] >> _THREES & 7).reshape(len(blocks), -1)
    lowered = (high >> 3).astype(np.uint8) * 255
    return _Parts(d[:, None].view(np.uint8), integers, blocks[:, :32] | (high & 7) << 8, lowered)


_PARTS: dict[str, Callable[[Octets], _Parts]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}


def _q2_k(d: Octets, pairs: Octets) -> Octets:
    """Lay out scales and minima of 1, pairs of bits, d, and the minimum's d."""
    ones = np.full((len(d), 16), 0x11, dtype=np.uint8)
    return np.concatenate((ones, pairs, d, d), axis=1)


def _tq2_0(blocks: Octets) -> tuple[Octets, Octets]:
    return blocks[:, 64:], blocks[:, :64]  # in the order of Q2_K


def _tq1_0(blocks: Octets) -> tuple[Octets, Octets]:
    """Decode five weights to a byte, times 1."""
    of_one = blocks.copy()
    of_one[:, 52:] = list(_ONE)
    codes = _gguf_type("TQ1_0").dequantize_blocks(of_one) + 1
    return blocks[:, 52:], _pairs(codes.astype(np.uint8))


_TERNARY = {"TQ1_0": _tq1_0, "TQ2_0": _tq2_0}
