"""The layout of a quantized page, as data that the writer, the readers and a test share.

A page holds 32 tokens of one KV head: key codes, value codes, then a record of scales. The codes
stand in fragment order of the tensor cores (`mma.m16n8k16`, four elements of the summed dimension
per thread): a warp that reads a page front to back, 16 bytes per thread, has every code in the
register where it is multiplied, so no code crosses lanes or shared memory.

The order is written as names of index bits: "t3" is bit 3 of the token's place in the page, "d0"
the lowest bit of the dimension. No two tokens share a byte, so tokens may be written concurrently.
Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

PAGE_TOKENS = 32
ALIGNMENT = 16  # bytes; every part of a page begins at a multiple of it
LOW_BITS = 5  # of d; higher bits are the outermost index of a page
DIM_STEP = 1 << LOW_BITS  # a page holds a multiple of this many dimensions


@dataclass(frozen=True, slots=True)
class CodeOrder:
    """The order of one page's key or value codes.

    Attributes:
        bits: in a code, 8 or 4.
        word: bits of the index of a 32-bit word, most significant first. The bits of d that are
            not named here or in `part` precede them, so a shorter head has a shorter page.
        part: bits of the index of a code among those that `dequantize` makes of a word, least
            significant first. With 8 bits that is the byte. With 4 bits it is the byte's upper
            bit, the nibble, the byte's lower bit: the codes of a register pair are 16 bits apart.
        rows: bits of the row of the tile that is multiplied, most significant first; the rows are
            summed by the product. Without the bits of d beyond `LOW_BITS`, too.
        columns: bits of the column of the tile.
    """

    bits: int
    word: tuple[str, ...]
    part: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def byte(self) -> tuple[str, ...]:
        """Bits of the byte's address, lowest first, without those of d beyond `LOW_BITS`."""
        low = self.part if self.bits == 8 else (self.part[2], self.part[0])
        return (*low, *reversed(self.word))

    @property
    def nibble(self) -> str | None:
        """The bit that chooses the upper nibble of a byte: one of two dimensions of a token."""
        return self.part[1] if self.bits == 4 else None

    @property
    def axes(self) -> tuple[int, ...]:
        """The permutation of a page's codes into the tile's order.

        It takes an axis for the dimensions beyond `LOW_BITS`, then one of length 2 for each bit of
        `word` and of `part`.
        """
        return self._axes_of(("high", *self.word, *self.part))

    @property
    def byte_axes(self) -> tuple[int, ...]:
        """The same permutation of codes of 8 bits as they lie in memory."""
        assert self.bits == 8
        return self._axes_of(("high", *self.word, *reversed(self.part)))

    def _axes_of(self, names: tuple[str, ...]) -> tuple[int, ...]:
        tile = (*_with_high(self.rows), *_with_high(self.columns))
        return tuple(names.index(name) for name in tile)

    def address(self, token: int, dim: int) -> tuple[int, int]:
        """Return the byte and the nibble of one element's code."""
        index = {"t": token, "d": dim}

        def bit(name: str) -> int:
            return index[name[0]] >> int(name[1:]) & 1

        byte = sum(bit(name) << place for place, name in enumerate(self.byte))
        byte += dim // DIM_STEP << len(self.byte)
        return byte, bit(self.nibble) if self.nibble else 0


def _with_high(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("high", *names) if names[0][0] == "d" else names


_TOKENS = ("t4", "t3", "t2", "t1", "t0")
_DIMS = ("d4", "d3", "d2", "d1", "d0")
# A thread loads 8 neighbours of a query and uses them as twice 4 rows of the keys' tile.
ROW_DIMS = ("d2", "d4", "d3", "d1", "d0")
# A thread has the probabilities of columns 2i, 2i + 1, 2i + 8 and 2i + 9; as rows of the second
# product it needs four neighbours. So rows 4i .. 4i + 3 of the values' tile are those four tokens.
ROW_TOKENS = ("t4", "t2", "t1", "t3", "t0")

KEYS = {
    8: CodeOrder(
        bits=8,
        word=("d2", "t2", "t1", "t0", "d4", "d3", "t4", "t3"),
        part=("d0", "d1"),
        rows=ROW_DIMS,
        columns=_TOKENS,
    ),
    4: CodeOrder(
        bits=4,
        word=("t2", "t1", "t0", "d4", "d3", "t4", "t3"),
        part=("d0", "d2", "d1"),
        rows=ROW_DIMS,
        columns=_TOKENS,
    ),
}
VALUES = {
    8: CodeOrder(
        bits=8,
        word=("d4", "d2", "d1", "d0", "t2", "t1", "d3", "t4"),
        part=("t0", "t3"),
        rows=ROW_TOKENS,
        columns=_DIMS,
    ),
    4: CodeOrder(
        bits=4,
        word=("d2", "d1", "d0", "t2", "t1", "d4", "t4"),
        part=("t0", "d3", "t3"),
        rows=ROW_TOKENS,
        columns=_DIMS,
    ),
}
# Latents are read as keys and as values at once: a token's codes lie side by side, `DIM_STEP` of
# them, which is a sector of memory, before the next token's.
IN_ROWS = CodeOrder(
    bits=8,
    word=("t4", "t3", "t2", "t1", "t0", "d4", "d3", "d2"),
    part=("d0", "d1"),
    rows=_TOKENS,
    columns=_DIMS,
)
INT8_ROWS = "int8-rows"  # the layout of INT8 pages with that order
# Permutes the probabilities, (rows, tokens as bits), into the order of the values' rows.
PROBABILITY_AXES = (0, *(1 + _TOKENS.index(name) for name in ROW_TOKENS))


# Bits of a code of keys, or of an element where pages hold elements; VALUE_BITS has the formats
# whose values differ.
ELEMENT_BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int8": 8,
    INT8_ROWS: 8,
    "int4": 4,
    "int4-sealed": 4,
    "k8v4": 8,
}
VALUE_BITS = {"k8v4": 4}
# Bytes of a token's float16 record. int8: scales of key and value. int4: scale and offset of the
# key, then of the value, PAGE_TOKENS words apart. int4-sealed: scale and offset of the value.
# k8v4: the same, then all scales of keys.
RECORD_BYTES = {"int8": 4, INT8_ROWS: 4, "int4": 8, "int4-sealed": 4, "k8v4": 6}


def layout_name(kv_format: str, in_rows: bool) -> str:
    """Return the name of a format's pages: its own, or `INT8_ROWS` where codes lie in rows."""
    return INT8_ROWS if in_rows and kv_format == "int8" else kv_format


def code_orders(kv_format: str) -> tuple[CodeOrder, CodeOrder]:
    """Return the orders of the codes of keys and of values."""
    if kv_format == INT8_ROWS:
        return IN_ROWS, IN_ROWS
    return KEYS[ELEMENT_BITS[kv_format]], VALUES[value_bits(kv_format)]


def value_bits(kv_format: str) -> int:
    """Return the bits of a value's code or element."""
    return VALUE_BITS.get(kv_format, ELEMENT_BITS[kv_format])


def stored_dims(kv_format: str, head_dim: int) -> int:
    """Return the dimensions in a page: codes come in steps of `DIM_STEP`."""
    if ELEMENT_BITS[kv_format] > 8:
        return head_dim
    return -(-head_dim // DIM_STEP) * DIM_STEP


def value_offset(kv_format: str, head_dim: int) -> int:
    """Return the offset of the values in a page, in bytes."""
    return PAGE_TOKENS * stored_dims(kv_format, head_dim) * ELEMENT_BITS[kv_format] // 8


def record_offset(kv_format: str, head_dim: int) -> int:
    """Return the offset of the scales in a page, in bytes."""
    values = PAGE_TOKENS * stored_dims(kv_format, head_dim) * value_bits(kv_format) // 8
    return value_offset(kv_format, head_dim) + values


def page_bytes(kv_format: str, head_dim: int) -> int:
    records = PAGE_TOKENS * RECORD_BYTES.get(kv_format, 0)
    # Keys of a sealed page have a scale per dimension, then an offset per dimension, both in the
    # order of the tile's rows.
    channels = 4 * stored_dims(kv_format, head_dim) if kv_format == "int4-sealed" else 0
    return record_offset(kv_format, head_dim) + records + channels


def channel_offset(head_dim: int) -> int:
    """Return the offset of the keys' scales in a sealed page, in bytes; their offsets follow."""
    return record_offset("int4-sealed", head_dim) + PAGE_TOKENS * RECORD_BYTES["int4-sealed"]


@cache
def key_dim(row: int) -> int:
    """Return the dimension in a row of the keys' tile."""
    low = sum((row >> LOW_BITS - 1 - i & 1) << int(name[1:]) for i, name in enumerate(ROW_DIMS))
    return low + row // DIM_STEP * DIM_STEP
