"""Parts of a step in the library, for models whose other arithmetic is done elsewhere."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.weight_bytes import linear_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.step_structs import BatchStruct
    from appliance.kernels.cpu.structs import AttentionStruct, LinearStruct


class LibraryLinear:
    """A weight in the library's tiles.

    Args:
        struct: points to the tiles.
        arena: holds them.
    """

    def __init__(self, engine: NativeEngine, struct: LinearStruct, arena: Arena) -> None:
        self.in_features = int(struct.in_features)
        self.out_features = int(struct.out_features)
        self.nbytes = linear_bytes(struct) + (4 * self.out_features if struct.bias else 0)
        self._engine = engine
        self.arena = arena  # held as long as the weight is
        self._address = ctypes.byref(struct)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x (num_rows, in_features): (num_rows, out_features) float32.

        Raises:
            MemoryError: the rows need more workspace than there is.
        """
        x = x.float().contiguous()
        num_rows, in_features = x.shape
        assert in_features == self.in_features, (x.shape, self.in_features)
        out: Tensor = arrays.empty((num_rows, self.out_features), "float32", x)
        engine = self._engine
        check(
            engine.library.ap_multiply(
                engine.handle, self._address, x.data_ptr(), num_rows, out.data_ptr()
            )
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, ids (count,) int64: (count, in_features) float32."""
        ids = ids.contiguous()
        out: Tensor = arrays.empty((len(ids), self.in_features), "float32", ids)
        engine = self._engine
        check(
            engine.library.ap_rows(
                engine.handle, self._address, ids.data_ptr(), len(ids), out.data_ptr()
            )
        )
        return out


def attend_layer(
    engine: NativeEngine,
    attention: AttentionStruct,
    cache: NativeCache,
    layer: int,
    batch: BatchStruct,
    qkv: Tensor,
) -> Tensor:
    """Write one layer's keys and values to the cache and attend.

    Args:
        layer: of the cache.
        batch: says where the step's rows lie.
        qkv: (num_tokens, num_heads + 2 * num_kv_heads, head_dim) float32, rotated.

    Returns:
        (num_tokens, num_heads, head_dim) float32.

    Raises:
        MemoryError: the step needs more workspace than there is.
    """
    assert qkv.is_contiguous(), qkv.stride()
    assert arrays.dtype_name(qkv.dtype) == "float32", qkv.dtype
    shape = (qkv.shape[0], attention.num_heads, attention.head_dim)
    out: Tensor = arrays.empty(shape, "float32", qkv)
    check(
        engine.library.ap_attend(
            engine.handle,
            ctypes.byref(attention),
            ctypes.byref(cache.struct),
            layer,
            ctypes.byref(batch),
            qkv.data_ptr(),
            out.data_ptr(),
        )
    )
    return out


def encode_trellis(
    engine: NativeEngine, bits: int, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the symbols of closed sequences, so that their table values are near.

    Args:
        bits: of a symbol, 2 to 5.
        values: (count, 64) float32.
        weights: (count, 64) float32, how often each squared error counts.

    Returns:
        Symbols, one in a byte, and their values in float32; both (count, 64).
    """
    values, weights = values.contiguous(), weights.contiguous()
    symbols: Tensor = arrays.empty(values.shape, "uint8", values)
    found: Tensor = arrays.empty(values.shape, "float32", values)
    check(
        engine.library.ap_trellis_encode(
            engine.handle,
            bits,
            values.data_ptr(),
            weights.data_ptr(),
            values.shape[0],
            symbols.data_ptr(),
            found.data_ptr(),
        )
    )
    return symbols, found
