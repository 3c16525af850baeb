"""Starts and ends the process of another rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from appliance import log
from appliance.engine.ranks.messages import SendBack, receive_answer, send
from appliance.runtime import ALLOCATOR, OPENMP, child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.engine.ranks.messages import FromRank

# -P: import nothing from the current folder.
COMMAND = (sys.executable, "-P", "-m", "appliance.engine.ranks")


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
                    *("--socket", str(theirs.fileno()), "--exchange", str(exchange)),
                    *("--cache", str(cache), "--parent", str(os.getpid())),
                    *("--log-level", level, "--log-format", form),
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
