"""The order of codes in a stored tile: that in which tensor cores take them.

A tile has TILE_N output features; its codes are 32-bit words, of which a thread loads four side by
side. Bits of the indices have names. Of a word: `w` its warp, `l` its lane, `r` its place among the
four of a lane. Of a code in its word: `j`, the bits of its plane's number. Of a weight in its tile:
`n` and `k`. An order gives the storage bit of each bit of n and k; packing, kernels and tests all
take it from here.

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
        bits: of a code, 4 or 8.
    """

    bits: int

    @property
    def tile_k(self) -> int:
        """Inputs of a tile: as many as a lane's four words hold."""
        return 1 << len(_K[self.bits])

    @property
    def words(self) -> int:
        """Words of a tile."""
        return TILE_N * self.tile_k * self.bits // 32

    @property
    def storage_bits(self) -> tuple[str, ...]:
        """Names of the bits of a stored code's index: of its word, then of its plane."""
        return (*_WARPS, *_LANES, "r1", "r0", *self._plane_bits())

    @property
    def weight_bits(self) -> tuple[str, ...]:
        """The same names in the order of a weight's index: those of n, then those of k."""
        return (*_N[self.bits], *_K[self.bits])

    def places(self) -> tuple[int, ...]:
        """The place of each plane's code in its word, in units of a code."""
        return tuple(
            sum(
                (plane >> int(name[1]) & 1) << i
                for i, name in enumerate(reversed(_PLACE[self.bits]))
            )
            for plane in range(32 // self.bits)
        )

    def kernel_axes(self, *, first_group: bool = False) -> tuple[int, ...]:
        """Return the permutation by which a kernel joins its planes into a tile of weights.

        Joining planes in pairs, pairs in pairs and so on gives axes (tiles in n, tiles in k,
        bits of the word, j0, j1, ...), all but the first two of size 2. The permutation leaves
        (tiles in n, bits of n, tiles in k, bits of k).

        Args:
            first_group: the words are split by r1, the first bit of k.
        """
        word = [name for name in (*_WARPS, *_LANES, "r1", "r0") if name != "r1" or not first_group]
        source = ["tiles_n", "tiles_k", *word, *reversed(self._plane_bits())]
        k = _K[self.bits]
        assert k[0] == "r1", k
        target = ["tiles_n", *_N[self.bits], "tiles_k", *k[1 if first_group else 0 :]]
        return tuple(source.index(name) for name in target)

    def pack(self, codes: Tensor) -> Tensor:
        """Store tiles.

        Args:
            codes: (..., TILE_N, tile_k) uint8, one code each.

        Returns:
            (..., words) int32.
        """
        batch = codes.shape[:-2]
        planes = self._permute(codes, batch, self.weight_bits, self.storage_bits)
        planes = planes.reshape(*batch, self.words, 32 // self.bits)
        words = torch.zeros_like(planes[..., 0], dtype=torch.int64)
        for plane, place in enumerate(self.places()):
            words |= planes[..., plane].to(torch.int64) << (place * self.bits)
        return to_int32(words)

    def unpack(self, words: Tensor) -> Tensor:
        """Invert `pack`: (..., words) int32 -> (..., TILE_N, tile_k) uint8."""
        batch = words.shape[:-1]
        mask = (1 << self.bits) - 1
        planes = [(words >> place * self.bits) & mask for place in self.places()]
        stored = torch.stack(planes, dim=-1).to(torch.uint8)
        weights = self._permute(stored, batch, self.storage_bits, self.weight_bits)
        return weights.reshape(*batch, TILE_N, self.tile_k)

    def _plane_bits(self) -> tuple[str, ...]:
        return ("j2", "j1", "j0") if self.bits == 4 else ("j1", "j0")

    @staticmethod
    def _permute(
        x: Tensor, batch: torch.Size, source: tuple[str, ...], target: tuple[str, ...]
    ) -> Tensor:
        axes = [len(batch) + source.index(name) for name in target]
        return x.reshape(*batch, *[2] * len(source)).permute(*range(len(batch)), *axes)


def to_int32(words: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values as int32."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
