"""The ranks of a model: processes that meet in shared memory and sum their partial results.

The order of a meeting: rank 0 waits for the others, writes the next order, and meets them.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.structs import Status

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
        self.rank, self.size, self._floats = rank, size, floats
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

    def exchange(self, status: int = Status.OK) -> None:
        """Meet; what a rank wrote to its slot is then the others' to read, for one exchange.

        Args:
            status: of this rank's work; the worst of all ranks' is raised in all.

        Raises:
            MemoryError: a rank lacked memory.
            RankLostError: one has ended.
        """
        check(self._library.ap_group_exchange(self.handle, status))

    def slot(self, rank: int, shape: tuple[int, int], *, is_before: bool = False) -> Tensor:
        """View float32 numbers in a rank's slot, of this exchange or of the one before."""
        count = prod(shape)
        assert count <= self._floats, shape
        address = self._library.ap_group_slot(self.handle, rank, is_before)
        numbers = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
        found: Tensor = arrays.of_numpy(numbers.reshape(shape))
        return found

    def sum(self, values: Tensor) -> None:
        """Sum the ranks' values, contiguous float32, in place; all ranks get the same bits.

        Raises:
            RankLostError: one has ended.
        """
        check(self._library.ap_group_sum(self.handle, values.data_ptr(), values.numel()))
