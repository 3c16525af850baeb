"""The order of codes in a stored tile: that in which tensor cores take them.

A tile has TILE_N output features; its codes are 32-bit words, of which a thread loads four side by
side. Bits of the indices have names. Of a word: `w` its warp, `l` its lane, `r` its place among the
four of a lane. Of a code in its word: `j`, the bits of its plane's number. Of a weight in its tile:
`n` and `k`. An order gives the storage bit of each bit of n and k; packing, kernels and tests all
take it from here.

Codes of other sizes than 4 and 8 bits are in the order of those of 4 bits, their bits in planes one
after another: of each tile the nibbles, or else the pairs of bits, then the pairs or bits above
them. A lane has four words of nibbles, two of pairs and one of bits, side by side.

The tables follow the register fragments of operand A in the PTX manual, which are the same for
`mma.m16n8k16` (each warp has 16 of the 64 rows) and `wgmma.m64nNk16`: one order serves all
architectures. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_N = 64
_WARPS = ("w1", "w0")
_LANES = ("l4", "l3", "l2", "l1", "l0")
_HALF = 16  # bits of a word; each half has one weight of every pair


# Bits from the most significant to the least.
_N = {4: ("w1", "w0", "j2", "l4", "l3", "l2"), 8: ("w1", "w0", "r0", "l4", "l3", "l2")}
_K = {4: ("r1", "r0", "j1", "l1", "l0", "j0"), 8: ("r1", "j1", "l1", "l0", "j0")}
# The place of each plane in its word, in units of a code; widened, planes 0 and 1 are the halves of
# one register.
_PLACE = {4: ("j0", "j2", "j1"), 8: ("j0", "j1")}


@dataclass(frozen=True)
class TileOrder:
    """The order of a tile of TILE_N output features by `tile_k` inputs.

    Attributes:
        bits: of a code: 2 to 6, or 8.
    """

    bits: int

    @property
    def tile_k(self) -> int:
        """Inputs of a tile: as many as a lane's four words of 4 or 8 bits hold."""
        return 1 << len(_K[self._like])

    @property
    def words(self) -> int:
        """Words of a tile."""
        return TILE_N * self.tile_k * self.bits // 32

    @property
    def parts(self) -> tuple[int, ...]:
        """Bits of a code in each plane of a tile, from the lowest."""
        return {2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(self.bits, (self.bits,))

    @property
    def storage_bits(self) -> tuple[str, ...]:
        """Names of the bits of a stored code's index: of its word, then of its plane."""
        return (*_WARPS, *_LANES, "r1", "r0", *self._plane_bits())

    @property
    def weight_bits(self) -> tuple[str, ...]:
        """The same names in the order of a weight's index: those of n, then those of k."""
        return (*_N[self._like], *_K[self._like])

    def places(self) -> tuple[int, ...]:
        """The place of each plane's code in its word, in units of a code of 4 or 8 bits."""
        return tuple(
            sum(
                (plane >> int(name[1]) & 1) << i
                for i, name in enumerate(reversed(_PLACE[self._like]))
            )
            for plane in range(32 // self._like)
        )

    def kernel_axes(self, *, groups: int = 1) -> tuple[int, ...]:
        """Return the permutation by which a kernel joins its planes into a tile of weights.

        Joining planes in pairs, pairs in pairs and so on gives axes (tiles in n, tiles in k,
        bits of the word, j0, j1, ...), all but the first two of size 2. The permutation leaves
        (tiles in n, bits of n, tiles in k, bits of k).

        Args:
            groups: 1, 2 or 4; the words are split by the first bits of k into so many groups.
        """
        k, split = _K[self._like], groups.bit_length() - 1
        word = [name for name in (*_WARPS, *_LANES, "r1", "r0") if name not in k[:split]]
        source = ["tiles_n", "tiles_k", *word, *reversed(self._plane_bits())]
        assert set(k[:split]) <= {"r1", "r0"}, k
        target = ["tiles_n", *_N[self._like], "tiles_k", *k[split:]]
        return tuple(source.index(name) for name in target)

    def int8_axes(self, *, groups: int = 1) -> tuple[int, ...]:
        """Return the permutation by which a kernel makes int8 fragments of words of 4-bit codes.

        The axes are (tiles in n, tiles in k, bits of the word, j1, j0, j2): a register of such a
        fragment has four codes of one output feature. The permutation leaves those of
        `kernel_axes`, but inputs in the order of `int8_matmul.kernel.in_order`.

        Args:
            groups: 1 or 2; the words are split by the first bit of k into so many groups.
        """
        assert self.bits == 4, self.bits
        k, split = ("r1", "r0", "l1", "l0", "j1", "j0"), groups.bit_length() - 1
        word = [name for name in (*_WARPS, *_LANES, "r1", "r0") if name not in k[:split]]
        source = ["tiles_n", "tiles_k", *word, "j1", "j0", "j2"]
        return tuple(source.index(name) for name in ("tiles_n", *_N[4], "tiles_k", *k[split:]))

    def pack(self, codes: Tensor) -> Tensor:
        """Store tiles.

        Args:
            codes: (..., TILE_N, tile_k) uint8, one code each.

        Returns:
            (..., words) int32.
        """
        batch = codes.shape[:-2]
        stored = self._permute(codes, batch, self.weight_bits, self.storage_bits)
        stored = stored.reshape(*batch, -1, 4, 32 // self._like)  # lanes, words, planes
        planes, low = [], 0
        for bits in self.parts:
            part = (stored >> low & ((1 << bits) - 1)).to(torch.int64)
            lanes = (part << self._shifts(bits, codes)).flatten(-2)
            words = lanes.unflatten(-1, (self._each(bits), -1)).sum(-1)
            planes.append(to_int32(words).flatten(-2))
            low += bits
        return torch.cat(planes, -1)

    def unpack(self, words: Tensor) -> Tensor:
        """Invert `pack`: (..., words) int32 -> (..., TILE_N, tile_k) uint8."""
        batch = words.shape[:-1]
        total: Tensor | int = 0
        first, low = 0, 0
        for bits in self.parts:
            size = self.words * bits // self.bits
            each = self._each(bits)
            lanes = words[..., first : first + size].reshape(*batch, -1, each, 1)
            shifts = self._shifts(bits, words).view(each, -1)
            total = total | ((lanes >> shifts & ((1 << bits) - 1)) << low).flatten(-2)
            first, low = first + size, low + bits
        assert isinstance(total, Tensor)
        weights = self._permute(total.to(torch.uint8), batch, self.storage_bits, self.weight_bits)
        return weights.reshape(*batch, TILE_N, self.tile_k)

    @property
    def _like(self) -> int:
        """The size of codes that have the same order: 4 or 8."""
        return 8 if self.bits == 8 else 4

    def _each(self, bits: int) -> int:
        """Return the words of a lane in a plane of so many bits."""
        return 4 if self._like == 8 else bits

    def _shifts(self, bits: int, like: Tensor) -> Tensor:
        """Return the shifts of a plane of so many bits, (4, planes): by a code's word and place."""
        planes = torch.arange(32 // self._like, device=like.device)
        pairs = len(planes) // 2
        before = torch.arange(4, device=like.device).unsqueeze(1) * pairs * bits % _HALF
        return before + planes // 2 * bits + planes % 2 * _HALF

    def _plane_bits(self) -> tuple[str, ...]:
        return ("j2", "j1", "j0") if self._like == 4 else ("j1", "j0")

    @staticmethod
    def _permute(
        x: Tensor, batch: torch.Size, source: tuple[str, ...], target: tuple[str, ...]
    ) -> Tensor:
        axes = [len(batch) + source.index(name) for name in target]
        return x.reshape(*batch, *[2] * len(source)).permute(*range(len(batch)), *axes)


def to_int32(words: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values as int32."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
