"""Engines that repeat their prompt, forked from one process that has imported them once.

Each engine is a process of its own: the starter waits for it and signals it as if it had executed
it. A fork skips only the interpreter's start and the imports, nine tenths of such an engine's work.
tests/engine/process and tests/server/test_serve.py start the program itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from support.echo import echo_worker

PR_SET_CHILD_SUBREAPER = 36
LONGEST = 1 << 20  # bytes of a message to the forking process
ADOPTION_SECONDS = 60.0


class ForkedProcess:
    """The part of `subprocess.Popen` that the supervisor uses, for an adopted child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        with self._waiting:
            return self._wait(os.WNOHANG)

    def wait(self) -> int:
        with self._waiting:
            code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Forks:
    """Replaces the module `subprocess` where engines are started."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, orders: socket.socket, program: Sequence[str]) -> None:
        self._orders = orders
        self._program = list(program)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:  # noqa: N802 - its name
        """Fork an engine; execute any other program."""
        length = len(self._program)
        if list(command[:length]) != self._program:
            return subprocess.Popen(command, **options)
        return ForkedProcess(
            self._fork(command[length:], options["pass_fds"], options.get("env") or os.environ)
        )

    def _fork(self, words: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str]) -> int:
        order = json.dumps([list(words), list(pass_fds), dict(env)]).encode()
        assert len(order) < LONGEST
        set_adopting(True)
        try:
            socket.send_fds(self._orders, [order], [*pass_fds, 2])
            return int(self._orders.recv(64))
        finally:
            set_adopting(False)


@contextmanager
def echo_forks(program: Sequence[str]) -> Iterator[Forks]:
    """Start the process to fork from.

    Args:
        program: an engine's command; each fork gets its own further arguments and descriptors.
    """
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    with process, orders:
        yield Forks(orders, program)


def set_adopting(on: bool) -> None:
    """Adopt the orphaned descendants of this process as its children, or stop doing so."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0


def serve_forks(orders: socket.socket) -> None:
    gc.collect()
    gc.freeze()  # else a garbage collection would copy the pages that all forks share
    while True:
        order, given, _, _ = socket.recv_fds(orders, LONGEST, 8)
        if not order:
            return
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            engine = os.fork()
            if not engine:
                os.close(told)
                os.close(tell)
                orders.close()
                become(given, *json.loads(order))
            os.write(tell, str(engine).encode())
            os._exit(0)
        os.close(tell)
        os.waitpid(between, 0)  # the child has been adopted by now
        orders.send(os.read(told, 64))
        for descriptor in (told, *given):
            os.close(descriptor)


def become(given: list[int], words: list[str], meant: list[int], env: dict[str, str]) -> NoReturn:
    """Become an engine that was started with these arguments, descriptors and environment."""
    names = dict(zip(map(str, meant), map(str, given), strict=False))
    os.setsid()
    os.dup2(given[-1], 2)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    for place in range(1, len(words)):
        if words[place - 1] in ("--socket", "--metadata"):
            words[place] = names[words[place]]
    parent, end = int(words[words.index("--parent") + 1]), time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != parent and time.monotonic() < end:
        time.sleep(0.0002)
    code = 1
    try:
        code = echo_worker.main(words)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
