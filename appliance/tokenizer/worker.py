"""Runs untrusted code in a process with limits: chat templates, regular expressions, grammars.

One uninterruptible step can take hours or gigabytes. The system ends the process when it exceeds
its time or memory, and the next text gets a new one. Loads no torch; ends with its parent.
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
from pathlib import Path
from typing import Any

from appliance.errors import ChatTemplateError
from appliance.runtime import child_environment

WALL_FACTOR = 10  # wall seconds per CPU second: the machine may be busy
START_SECONDS = 60.0  # for Python to start on a busy machine
_LENGTH = struct.Struct("<I")

Handler = Callable[[dict[str, Any]], Any]


class WorkerEndedError(Exception): ...


class TokenizerWorker:
    """One process; used by one thread at a time.

    Args:
        setup: its task: `template`, `tokenizer` or `grammar`, see `_handler`.
        cpu_seconds: limit for the setup.
        memory_bytes: limit of its address space.
    """

    def __init__(self, setup: Mapping[str, Any], *, cpu_seconds: float, memory_bytes: int) -> None:
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
        try:
            self.ask(setup, cpu_seconds=cpu_seconds, wall_seconds=START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(
        self, request: Mapping[str, Any], *, cpu_seconds: float, wall_seconds: float = 0.0
    ) -> Any:
        """Send a request and return the answer.

        Raises:
            WorkerEndedError: it exceeded a limit; discard the worker.
        """
        deadline = time.monotonic() + wall_seconds + WALL_FACTOR * cpu_seconds
        frame = json.dumps([cpu_seconds, request]).encode()
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
            (size,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            return json.loads(self._receive(size, deadline))
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
        cpu_seconds: limit for the setup.
    """

    def __init__(
        self, setup: Mapping[str, Any], *, cpu_seconds: float, memory_bytes: int, most: int
    ) -> None:
        self._setup = setup
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._turn = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[TokenizerWorker] = []
        self._all: set[TokenizerWorker] = set()
        self.started = 0  # all time
        weakref.finalize(self, _end_all, self._all)

    def ask(self, request: Mapping[str, Any], *, cpu_seconds: float) -> Any:
        """Send a request to one of them and return its answer.

        Raises:
            WorkerEndedError: it exceeded a limit; the next call gets another process.
        """
        with self._turn:
            worker = self._take()
            try:
                answer = worker.ask(request, cpu_seconds=cpu_seconds)
            except BaseException:
                self._drop(worker)
                raise
            with self._lock:
                if worker in self._all:  # otherwise `close` has ended it
                    self._idle.append(worker)
            return answer

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

    def _take(self) -> TokenizerWorker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        worker = TokenizerWorker(
            self._setup, cpu_seconds=self._cpu_seconds, memory_bytes=self._memory_bytes
        )
        with self._lock:
            self.started += 1
            self._all.add(worker)
        return worker

    def _drop(self, worker: TokenizerWorker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()


def _end_all(workers: set[TokenizerWorker]) -> None:
    while workers:
        workers.pop().kill()


# ---- in the process ----


def _handler(setup: Mapping[str, Any]) -> Handler:
    """Build the request handler.

    Args:
        setup: `template`, arguments of a `ChatTemplate`; `tokenizer`, its folder, and `separator`,
            see `Tokenizer`; or `grammar`, to check grammars.
    """
    if "grammar" in setup:
        from appliance.grammar.check import answer_of

        return answer_of
    if "template" in setup:
        from appliance.tokenizer.chat_template import ChatTemplate

        template = ChatTemplate(**setup["template"])

        def render(request: dict[str, Any]) -> dict[str, str]:
            try:
                return {"text": template.render(request.pop("messages"), **request)}
            except ChatTemplateError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise
                return {"refused": str(error)}

        return render
    from appliance.tokenizer.from_folder import read_folder
    from appliance.tokenizer.source import with_separator

    backend = with_separator(read_folder(Path(setup["tokenizer"])).backend, setup["separator"])

    def encode(request: dict[str, Any]) -> list[list[int]]:
        if "pair" in request:
            both = backend.encode(*request["pair"])
            return [both.ids, both.special_tokens_mask]
        texts, special = request["texts"], request["add_special_tokens"]
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=special)]

    return encode


def _serve(sock: socket.socket, memory_bytes: int) -> None:
    """Answer until the peer disconnects; exceeding a limit ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle: Handler | None = None
    while (head := _exactly(sock, _LENGTH.size)) is not None:
        content = _exactly(sock, *_LENGTH.unpack(head))
        if content is None:
            return
        cpu_seconds, request = json.loads(content)
        # Counts all threads; the signal ends the process in any state.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if handle is None:
            handle, answer = _handler(request), None
        else:
            answer = handle(request)
        frame = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sock.sendall(_LENGTH.pack(len(frame)) + frame)


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
