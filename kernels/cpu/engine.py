"""The library's engine as a Python object: threads, workspace, exceptions for status codes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from appliance.kernels.cpu.structs import Status

if TYPE_CHECKING:
    import ctypes


class RankLostError(Exception):
    """Another process of the group has ended, so no step can be computed."""


class NativeEngine:
    """The threads and the workspace with which the library runs; used by one thread at a time.

    Args:
        threads: of a step, the caller's included.
        max_workspace_bytes: a step that needs more fails; 0 sets no limit.

    Raises:
        MemoryError: the threads could not be started.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, max_workspace_bytes: int = 0) -> None:
        self.library = library
        self.threads = threads
        self.handle = library.ap_engine_create(threads, max_workspace_bytes)
        if not self.handle:
            raise MemoryError(f"the system gives no memory for {threads} threads")
        self._finalizer = weakref.finalize(self, library.ap_engine_destroy, self.handle)

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that a step has needed so far."""
        return int(self.library.ap_workspace_bytes(self.handle))

    def watch(self, progress: int) -> None:
        """Count the progress of steps in a 64-bit word at a fixed address."""
        self.library.ap_engine_watch(self.handle, progress)

    def join(self, group: int | None) -> None:
        """Take part in the steps of a group of ranks, given by address; None runs steps alone."""
        self.library.ap_engine_join(self.handle, group)

    def close(self) -> None:
        """End the threads and free the workspace."""
        self._finalizer()


def check(status: int) -> None:
    """Turn the status of a call into an exception.

    Raises:
        MemoryError: the workspace could not grow.
        RankLostError: another process of the group has ended.
    """
    if status == Status.OK:
        return
    if status == Status.RANK_LOST:
        raise RankLostError("a process that holds a part of the model has ended")
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory for the workspace of this step; lower max_num_batched_tokens")
    raise AssertionError(Status(status).name)
