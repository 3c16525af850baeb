"""Starts an engine process with its inherited descriptors, before there is an event loop.

The process imports for a third of a second or more, so `appliance serve` starts it before it reads
its own arguments. For the same reason this file imports almost nothing.

Both processes share memory: a 64-bit word per block, and the beacon. It is created before the
number of blocks is known, with room for many more: untouched pages cost nothing. Its size is
sealed, so no access can fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from appliance.engine.nouns.beacon import WORDS, Beacon
from appliance.errors import EngineError
from appliance.runtime import ALLOCATOR, OPENMP, child_environment

MAX_BLOCKS = 2**23
WORD_BYTES = 8
_BYTES = (MAX_BLOCKS + WORDS) * WORD_BYTES
# From linux/fcntl.h; fcntl of Python 3.11 lacks some of them.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
DUMP_STACKS_SIGNAL = signal.SIGUSR1  # an engine process writes its stacks into the log
# -P: do not import from the current folder.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "appliance.engine.process")


class LaunchedProcess:
    """A started process, the parent's end of its socket and the file of its block metadata.

    As a context manager it ends the process if nothing else has.

    Attributes:
        when: monotonic start time.
        socket: the parent's end; closes with the others unless taken.

    Raises:
        EngineError: the system is out of processes, descriptors or memory.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.when = time.monotonic()
        try:
            self._launch(command)
        except OSError as error:
            reason = error.strerror or error
            raise EngineError(f"the engine process cannot be started: {reason}") from error

    def _launch(self, command: Sequence[str]) -> None:
        with contextlib.ExitStack() as undo:  # release everything if a later call fails
            self.socket, theirs = socket.socketpair()
            undo.callback(self.socket.close)
            with theirs:
                self._metadata = create_metadata()
                undo.callback(os.close, self._metadata)
                self.process = subprocess.Popen(
                    [
                        *command,
                        "--socket",
                        str(theirs.fileno()),
                        "--metadata",
                        str(self._metadata),
                        "--parent",
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # libraries' prints belong in the log
                    pass_fds=(theirs.fileno(), self._metadata),
                    env={**ALLOCATOR, **OPENMP, **child_environment()},
                    start_new_session=True,  # Ctrl-C in the terminal goes only to the server
                )
            self._held = undo.pop_all()

    def take(self) -> int:
        """Give up ownership of the socket, and of the metadata's descriptor, which it returns."""
        self._held.pop_all()
        return self._metadata

    def __enter__(self) -> LaunchedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def create_metadata() -> int:
    """Create a zeroed memory file; return its descriptor."""
    descriptor = os.memfd_create("appliance-block-metadata", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _BYTES)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    return descriptor


def map_metadata(descriptor: int, *, writable: bool) -> memoryview:
    """Map the file's words and close the descriptor; the mapping lives as long as the view."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    mapping = mmap.mmap(descriptor, _BYTES, access=access)
    os.close(descriptor)
    return memoryview(mapping).cast("Q")


def beacon_of(words: memoryview) -> Beacon:
    return Beacon(words[MAX_BLOCKS:])
