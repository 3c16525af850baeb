"""Starts and ends the processes of the other ranks, and sends them orders."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from appliance import log
from appliance.engine.ranks.messages import (
    Join,
    RankFailed,
    RankJoined,
    SendBack,
    receive_answer,
    send,
)
from appliance.errors import EngineError
from appliance.kernels.arrays import dtype_name
from appliance.runtime import ALLOCATOR, OPENMP, child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.config import EngineConfig
    from appliance.engine.ranks.messages import FromRank, Room, ToRank
    from appliance.model.shard.split import Split


# -P: import nothing from the current folder.
COMMAND = (sys.executable, "-P", "-m", "appliance.engine.ranks")


class RankGroup:
    """The other ranks of a model, each a process that ends with this one.

    If one ends, every later order fails.

    Args:
        asked: the setting that requests ranks, for messages.
        size: ranks, this one included.
        environment: variables for the processes, added to this one's.

    Attributes:
        members: the others, in order.
        exchange: descriptor of a file in memory, still empty, in which they meet.
        cache: descriptor of another, for the KV cache or for blocks in transit.
        joined: the others' answers after loading, in order.
        kv_bytes: of all ranks' parts of the cache; empty before it is allocated.
        is_interrupted: a step began and did not end, so the ranks are out of step.

    Raises:
        EngineError: the system is out of processes, descriptors or memory.
    """

    def __init__(self, asked: str, size: int, environment: Mapping[str, str] | None = None) -> None:
        self.size = size
        self.joined: tuple[RankJoined, ...] = ()
        self.kv_bytes: tuple[int, ...] = ()
        self.is_interrupted = False
        self.members: list[RankProcess] = []
        files: list[int] = []
        self._end = weakref.finalize(self, _end, self.members, files)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            try:
                for name in ("appliance-ranks", "appliance-ranks-cache"):
                    files.append(os.memfd_create(name, os.MFD_CLOEXEC))
                self.exchange, self.cache = files
                for rank in range(1, size):
                    process = RankProcess(rank, self.exchange, self.cache, environment or {})
                    self.members.append(process)
            except OSError as error:
                raise EngineError(f"the processes of {asked}: {error.strerror}") from error
            undo.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the other ranks."""
        return tuple(member.process.pid for member in self.members)

    @property
    def watched(self) -> tuple[int, ...]:
        """Descriptors of the other ranks' processes, readable once they have ended."""
        return tuple(member.watched for member in self.members)

    def load(
        self,
        config: EngineConfig,
        split: Split,
        dtype: Any,
        threads: Sequence[int],
        bounds: tuple[int, ...],
        context_length: int,
        room: Room,
        device: str | None = None,
    ) -> None:
        """Tell the ranks to load their parts; `join` waits for them. See `Join`."""
        for member, count in zip(self.members, threads[1:], strict=True):
            join = Join(
                config,
                split.shares,
                split.is_exact,
                dtype_name(dtype),
                rank=member.rank,
                threads=count,
                bounds=bounds,
                room=room,
                context_length=context_length,
                device=device,
            )
            send(member.connection, join)

    def join(self) -> None:
        """Wait until all ranks have loaded their parts.

        Raises:
            EngineError: one could not.
        """
        self.joined = tuple(answer for answer in self.answers() if isinstance(answer, RankJoined))

    def send(self, messages: Sequence[ToRank]) -> None:
        """Send each rank its message.

        Raises:
            EngineError: one has ended.
        """
        try:
            for member, message in zip(self.members, messages, strict=True):
                send(member.connection, message)
        except OSError as error:
            raise EngineError(self.lost()) from error

    def ask(self, rank: int, message: ToRank) -> FromRank:
        """Send one rank a message, and wait for its answer.

        Raises:
            EngineError: it has ended, or failed to carry out the order.
        """
        self.tell(rank, message)
        return self._answer(self.members[rank - 1])

    def tell(self, rank: int, message: ToRank) -> None:
        """Send one rank a message.

        Raises:
            EngineError: it has ended.
        """
        try:
            send(self.members[rank - 1].connection, message)
        except OSError as error:
            raise EngineError(self.lost()) from error

    def answers(self) -> list[FromRank]:
        """Wait for the answer of each rank.

        Raises:
            EngineError: one has ended, or failed to carry out an order.
        """
        return [self._answer(member) for member in self.members]

    def check(self) -> None:
        """Raise if the ranks cannot run another step."""
        if self.is_interrupted:
            raise EngineError("a step of several ranks was interrupted; load the model again")

    def lost(self) -> str:
        """Describe the loss of a rank, with its exit if it has ended."""
        return self.describe_exit() or "a rank of the model does not answer"

    def describe_exit(self) -> str | None:
        """Describe the exit of the first rank that ends within half a second; None if none does."""
        ends = (member.describe_exit() for member in self.members)
        return next((how for how in ends if how is not None), None)

    def close(self) -> None:
        """End the other ranks."""
        self._end()

    def _answer(self, member: RankProcess) -> FromRank:
        try:
            answer = member.answer()
        except (EOFError, OSError) as error:
            raise EngineError(self.lost()) from error
        if isinstance(answer, RankFailed):
            raise EngineError(f"rank {member.rank}: {answer.reason}")
        return answer


def _end(members: list[RankProcess], files: list[int]) -> None:
    for member in members:
        member.end()
    members.clear()
    while files:
        os.close(files.pop())


class RankProcess:
    """The process of one rank, and rank 0's end of its socket.

    Args:
        rank: above 0.
        exchange: file of the memory for steps.
        cache: file of the KV cache.
        environment: variables for the process, added to this one's.
    """

    def __init__(
        self, rank: int, exchange: int, cache: int, environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        level, form = log.configured()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *COMMAND,
                    "--socket",
                    str(theirs.fileno()),
                    "--exchange",
                    str(exchange),
                    "--cache",
                    str(cache),
                    "--parent",
                    str(os.getpid()),
                    "--log-level",
                    level,
                    "--log-format",
                    form,
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a library's prints belong in the log
                pass_fds=(theirs.fileno(), exchange, cache),
                env={**ALLOCATOR, **OPENMP, **child_environment(**environment)},
            )
        self.connection = Connection(ours.detach())
        self.watched = os.pidfd_open(self.process.pid)

    def send_back(self, count: int, rounds: int) -> None:
        """Order the rank to serve as the other end of its link."""
        send(self.connection, SendBack(count, rounds))

    def answer(self, limit: float | None = None) -> FromRank:
        """Wait for its answer.

        Args:
            limit: seconds; None waits until the process ends.

        Raises:
            TimeoutError: it takes longer than the limit.
            EOFError, OSError: the process has ended.
        """
        if not self.connection.poll(limit):
            raise TimeoutError
        return receive_answer(self.connection)

    def describe_exit(self) -> str | None:
        """Describe the process's exit; None unless it ends within half a second."""
        try:
            code = self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return None
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"rank {self.rank} of the model (process {self.process.pid}) ended {how}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.watched)
