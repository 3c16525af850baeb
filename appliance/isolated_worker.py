"""Runs untrusted input in a process with limits: templates, expressions, grammars, pictures.

One uninterruptible step can take hours or gigabytes, and a decoder of foreign bytes can crash. The
system ends the process when it exceeds its time or memory, and the next request gets a new one.
Loads no torch; ends with its parent. Knows no task: who starts it names the function that makes the
handler.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from appliance.runtime import child_environment

WALL_FACTOR = 10  # wall seconds per CPU second: the machine may be busy
START_SECONDS = 60.0  # for Python to start on a busy machine
_LENGTHS = struct.Struct("<IQ")


class Packet(NamedTuple):
    """A request or an answer.

    Attributes:
        content: JSON's types.
        data: bytes that are no JSON.
    """

    content: Any
    data: bytes = b""


Handler = Callable[[Packet], Packet]


class WorkerEndedError(Exception): ...


class UnreadRequestError(WorkerEndedError):
    """It ended before it had read the whole request."""


class IsolatedWorker:
    """One process; used by one thread at a time.

    Args:
        task: makes the handler there, from `arguments`; a function of a module of ours.
        arguments: JSON's types.
        cpu_seconds: limit for the setup.
        memory_bytes: limit of its address space.
    """

    def __init__(
        self,
        task: Callable[..., Handler],
        arguments: Mapping[str, Any],
        *,
        cpu_seconds: float,
        memory_bytes: int,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(TOKENIZERS_PARALLELISM="false", RUST_BACKTRACE="0"),
                start_new_session=True,  # Ctrl-C in the terminal goes only to the server
            )
        self._socket = ours
        setup = Packet([task.__module__, task.__name__, arguments])
        try:
            self.ask(setup, cpu_seconds=cpu_seconds, wall_seconds=START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: Packet, *, cpu_seconds: float, wall_seconds: float = 0.0) -> Packet:
        """Send a request and return the answer.

        Raises:
            UnreadRequestError: it had ended before; discard the worker.
            WorkerEndedError: it exceeded a limit; discard the worker.
        """
        deadline = time.monotonic() + wall_seconds + WALL_FACTOR * cpu_seconds
        frame = _head(Packet([cpu_seconds, request.content], request.data))
        try:
            for part in (frame, request.data):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendall(part)
            content, data = _LENGTHS.unpack(self._receive(_LENGTHS.size, deadline))
            answer = json.loads(self._receive(content, deadline))
            return Packet(answer, self._receive(data, deadline))
        except ConnectionError as error:  # bytes were left unread; otherwise `_receive` raises
            raise UnreadRequestError(str(error)) from error
        except OSError as error:
            raise WorkerEndedError(str(error)) from error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise WorkerEndedError(f"it ended with code {self.process.wait()}")
            data += piece
        return bytes(data)


class Workers:
    """Identical processes, started on demand and kept.

    Thread-safe; a call waits while all processes are busy.

    Args:
        task: see `IsolatedWorker`.
        cpu_seconds: limit for the setup.
    """

    def __init__(
        self,
        task: Callable[..., Handler],
        arguments: Mapping[str, Any],
        *,
        cpu_seconds: float,
        memory_bytes: int,
        most: int,
    ) -> None:
        self._task = task
        self._arguments = arguments
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._turn = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[IsolatedWorker] = []
        self._all: set[IsolatedWorker] = set()
        self.started = 0  # all time
        weakref.finalize(self, _end_all, self._all)

    def ask(self, content: Any, data: bytes = b"", *, cpu_seconds: float) -> Packet:
        """Send a request to one of them and return its answer.

        A new process gets the request if an idle one was killed, such as for its memory.

        Raises:
            WorkerEndedError: it exceeded a limit; the next call gets another process.
        """
        request = Packet(content, data)
        with self._turn:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is not None:
                with contextlib.suppress(UnreadRequestError):
                    return self._ask(idle, request, cpu_seconds)
            return self._ask(self._start(), request, cpu_seconds)

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
            _end_all(self._all)

    def rest(self) -> None:
        """End idle processes; the next call starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            self._drop(worker)

    def _ask(self, worker: IsolatedWorker, request: Packet, cpu_seconds: float) -> Packet:
        try:
            answer = worker.ask(request, cpu_seconds=cpu_seconds)
        except BaseException:
            self._drop(worker)
            raise
        with self._lock:
            if worker in self._all:  # otherwise `close` has ended it
                self._idle.append(worker)
        return answer

    def _start(self) -> IsolatedWorker:
        worker = IsolatedWorker(
            self._task,
            self._arguments,
            cpu_seconds=self._cpu_seconds,
            memory_bytes=self._memory_bytes,
        )
        with self._lock:
            self.started += 1
            self._all.add(worker)
        return worker

    def _drop(self, worker: IsolatedWorker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()


def _end_all(workers: set[IsolatedWorker]) -> None:
    while workers:
        workers.pop().kill()


def _head(packet: Packet) -> bytes:
    """The lengths and the content, which the data follow."""
    content = json.dumps(packet.content).encode()
    return _LENGTHS.pack(len(content), len(packet.data)) + content


# ---- in the process ----


def _serve(sock: socket.socket, memory_bytes: int) -> None:
    """Answer until the peer disconnects; exceeding a limit ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle: Handler | None = None
    while (head := _exactly(sock, _LENGTHS.size)) is not None:
        sizes = _LENGTHS.unpack(head)
        received = [part for size in sizes if (part := _exactly(sock, size)) is not None]
        if len(received) < len(sizes):
            return
        cpu_seconds, content = json.loads(received[0])
        # Counts all threads; the signal ends the process in any state.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if handle is None:
            handle, answer = _handler(*content), Packet(None)
        else:
            answer = handle(Packet(content, received[1]))
        frame = _head(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sock.sendall(frame)
        sock.sendall(answer.data)


def _handler(module: str, name: str, arguments: Mapping[str, Any]) -> Handler:
    task: Callable[..., Handler] = getattr(import_module(module), name)
    return task(**arguments)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    with socket.socket(fileno=0) as connection, contextlib.suppress(ConnectionError):
        _serve(connection, int(sys.argv[1]))
