"""The engine's end of the socket pair to its supervisor."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING, TypeVar

from appliance.engine.nouns.messages import EndTokens, MemoryPlanned, Proceed, ToEngine, WeightsRead
from appliance.engine.process.framing import FrameDecoder, encode_frame
from appliance.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import FromEngine

AnswerT = TypeVar("AnswerT", Proceed, EndTokens)

_READ_BYTES = 1 << 20


class SupervisorGoneError(Exception):
    """The supervisor told this process to end, or went away."""


class EngineSocket:
    """Writes block; reads wait only on request."""

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._socket = sock
        self._decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._ranks: dict[int, int] = {}  # process id by pidfd

    def send(self, message: FromEngine) -> None:
        """Send one message; the next read notices a lost client."""
        try:
            self._socket.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Return arrived messages; with `wait`, at least one unless the connection ended.

        Raises:
            EngineError: a watched process has ended.
        """
        messages: list[ToEngine] = []
        while not self.closed:
            ready = self._poll.poll(None if wait and not messages else 0)
            if not ready:
                break
            if ended := [self._ranks[file] for file, _ in ready if file in self._ranks]:
                raise EngineError(f"process {ended[0]}, which has a part of the model, has ended")
            data = self._socket.recv(_READ_BYTES)
            if not data:
                self.closed = True
            messages += self._decoder.feed(data)
        return messages

    def watch(self, pids: Sequence[int]) -> None:
        """Watch processes: a read raises when one has ended."""
        for pid in pids:
            file = os.pidfd_open(pid)
            self._ranks[file] = pid
            self._poll.register(file, select.POLLIN)

    def ask_for_memory(self, needed: int, free: int) -> None:
        """Send the memory plan and wait for permission, or raise SupervisorGoneError."""
        self.send(MemoryPlanned(needed, free))
        self._answer(Proceed)

    def ask_for_end_tokens(self) -> tuple[int, ...]:
        """Wait for the tokens that end an answer, or raise SupervisorGoneError."""
        self.send(WeightsRead())
        return self._answer(EndTokens).ids

    def _answer(self, kind: type[AnswerT]) -> AnswerT:
        answer = self.receive(wait=True)
        if not answer or not isinstance(answer[0], kind):
            raise SupervisorGoneError
        return answer[0]

    def close_reading(self) -> None:
        """Make a pending or the next read see the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
