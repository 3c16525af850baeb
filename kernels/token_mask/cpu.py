"""Token masks by the CPU library: one pass over the logits of masked rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels import arrays

if TYPE_CHECKING:
    import ctypes

    from torch import Tensor


class NativeMasks:
    """See `reference.mask_tokens`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Ban the tokens whose bit is 0 in some rows; all tensors are contiguous, on the CPU."""
        num_masks, vocab_size = len(rows), logits.shape[1]
        for values, dtype in ((logits, "float32"), (rows, "int64"), (words, "int32")):
            assert arrays.dtype_name(values.dtype) == dtype, f"{values.dtype} where {dtype} is read"
            assert not values.is_cuda, "the CPU library reads the memory of the CPU"
            assert values.is_contiguous(), "the CPU library reads element after element"
        assert words.shape[0] == num_masks, (words.shape, num_masks)
        assert words.shape[1] * 32 >= vocab_size, (words.shape, vocab_size)
        self._library.ap_mask_logits(
            logits.data_ptr(),
            vocab_size,
            num_masks,
            rows.data_ptr(),
            words.data_ptr(),
            words.shape[1],
        )
