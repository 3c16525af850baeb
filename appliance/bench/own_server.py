"""Starts a server, watches its process tree, memory and CPU time, and ends it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import psutil

from appliance.bench.load import Endpoint, LoadError, fetch

if TYPE_CHECKING:
    from collections.abc import Mapping


class ServerProcess:
    """A server process and its descendants; logs their output."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], endpoint: Endpoint
    ) -> None:
        self.endpoint = endpoint
        if _is_listening(endpoint):
            raise LoadError(f"something listens on port {endpoint.port} already")
        self._log, path = tempfile.mkstemp(prefix="bench-server-")
        os.unlink(path)  # it lives until closed
        self.begin = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            # An earlier run's KV cache on disk would speed this one up.
            env={**os.environ, "APPLIANCE_KV_DISK": "off", **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @classmethod
    def ours(
        cls, port: int, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> ServerProcess:
        """Start `appliance serve` on a loopback port, with changed environment variables."""
        command = [sys.executable, "-P", "-m", "appliance", "serve", "--port", str(port)]
        command += arguments
        return cls(command, environment or {}, Endpoint("127.0.0.1", port))

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def healthy(self, limit: float = 600.0) -> float:
        """Wait for /health; return seconds since the start.

        Raises:
            LoadError: the server ended or was not healthy in time.
        """
        while (seconds := time.perf_counter() - self.begin) < limit:
            if self._process.poll() is not None:
                raise LoadError(f"ended with {self._process.returncode}: {self.last_words()}")
            try:
                async with asyncio.timeout(5):
                    status, _ = await fetch(self.endpoint, "/health")
                if status == 200:
                    return time.perf_counter() - self.begin
            except (OSError, LoadError):  # a timeout is an OSError
                pass
            await asyncio.sleep(0.02)
        raise LoadError(f"not healthy after {seconds:.0f} s: {self.last_words()}")

    def tree(self) -> list[psutil.Process]:
        """Return the process and all its descendants."""
        try:
            main = psutil.Process(self._process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """Return CPU seconds of the tree, ended descendants included."""
        total = 0.0
        for process in self.tree():
            try:
                total += sum(process.cpu_times()[:4])  # own user and system, then ended children's
            except psutil.NoSuchProcess:
                continue
        return total

    def memory(self) -> dict[str, float]:
        """Return the tree's resident megabytes; PSS divides shared pages among their users."""
        rss = pss = count = 0
        for process in self.tree():
            try:
                sizes = process.memory_full_info()
            except psutil.NoSuchProcess:
                continue
            rss, pss, count = rss + sizes.rss, pss + sizes.pss, count + 1
        return {"rss_mb": round(rss / 1e6), "pss_mb": round(pss / 1e6), "processes": count}

    def last_words(self) -> str:
        """Return the end of the log."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, 1500, max(0, size - 1500)).decode(errors="replace")

    def stop(self) -> None:
        """End the tree and wait until the port is free.

        Raises:
            LoadError: the port is still taken.
        """
        tree = self.tree()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(tree, timeout=10)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        os.close(self._log)
        if _is_listening(self.endpoint):
            raise LoadError(f"port {self.endpoint.port} is still taken after the server's end")


def _is_listening(endpoint: Endpoint) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((endpoint.host, endpoint.port)) == 0
