"""The ranks of a model: processes that meet in shared memory and sum their partial results.

The order of a meeting: rank 0 waits for the others, writes the next order, and meets them.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from appliance.kernels.cpu.engine import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def group_bytes(library: ctypes.CDLL, size: int, floats: int) -> int:
    """Return the bytes of shared memory for `size` ranks that exchange `floats` numbers at once."""
    found = int(library.ap_group_bytes(size, floats))
    assert found > 0, (size, floats)
    return found


class NativeGroup:
    """This process among the ranks; used by one thread at a time.

    Args:
        address: of zeroed shared memory, which must not move.
        floats: most numbers of a rank in one exchange.
        processes: for each rank a descriptor that becomes readable when it ends, or -1; without
            any, ends go unnoticed.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        address: int,
        *,
        rank: int,
        size: int,
        floats: int,
        processes: Sequence[int] = (),
    ) -> None:
        self.rank, self.size = rank, size
        self._library = library
        watched = (ctypes.c_int32 * size)(*processes) if processes else None
        self.handle = library.ap_group_create(address, rank, size, floats, watched)
        if not self.handle:
            raise MemoryError("the system gives no memory for a group of ranks")
        self._finalizer = weakref.finalize(self, library.ap_group_destroy, self.handle)

    def wait(self) -> None:
        """Wait until the other ranks are at the next meeting.

        Raises:
            RankLostError: one has ended.
        """
        check(self._library.ap_group_await(self.handle))

    def meet(self) -> None:
        """Join the next meeting and wait for the others, asleep if it takes long.

        Raises:
            RankLostError: one has ended.
        """
        check(self._library.ap_group_meet(self.handle))

    def sum(self, values: Tensor) -> None:
        """Sum the ranks' values, contiguous float32, in place; all ranks get the same bits.

        Raises:
            RankLostError: one has ended.
        """
        check(self._library.ap_group_sum(self.handle, values.data_ptr(), values.numel()))
