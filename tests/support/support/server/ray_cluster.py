"""A local Ray cluster with ports and a folder of its own, and the product's commands on it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from support.runs.forked_commands import forked_commands
from support.server.free_ports import free_port

KEY = "key-of-the-test"
IMPORTED = ("ray.serve", "appliance.cluster.control", "appliance.cluster.deployments")
STARTS = 4  # Ray gives its own processes 15 s to import; a busy machine may need another try


class RayCluster:
    """`ray start --head` with ports and a folder of its own, and the commands on it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.port = free_port()
        self._environment = {
            **os.environ,
            "APPLIANCE_API_KEY": KEY,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else Ray gives its workers the last turn
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        self._held = contextlib.ExitStack()
        for number in range(STARTS):
            if self._start(folder / str(number)):
                break
        else:
            said = self._log.read_text()[-2000:]
            raise AssertionError(f"Ray did not start {STARTS} times:\n{said}")
        self._commands = self._held.enter_context(
            # Ray reads the last variable at import.
            forked_commands(folder, IMPORTED, **self._environment, RAY_ENABLE_AUTO_CONNECT="0")
        )

    def _start(self, folder: Path) -> bool:
        folder.mkdir()
        self._log = folder / "log"
        with self._log.open("w") as stream:
            self._ray = psutil.Popen(
                [
                    str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
                    "--port", self.address.partition(":")[2], "--num-cpus", "3",
                    "--include-dashboard", "false", "--temp-dir", str(folder),
                    # Nothing here needs these, which take seconds to import.
                    "--no-monitor", "--include-log-monitor", "false",
                ],
                stdout=stream,
                stderr=stream,
                env=self._environment,
            )  # fmt: skip
        while self._ray.poll() is None:
            if "--block" in self._log.read_text():
                return True
            time.sleep(0.1)
        self.end()
        return False

    def end(self) -> None:
        """End all its processes, by process id."""
        self._held.close()
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [self._ray, *self._ray.children(recursive=True)]
            self._ray.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._ray.wait(10)
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(processes)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `appliance cluster` on it."""
        return self._commands.run("cluster", *words, "--address", self.address)

    def replicas(self) -> list[dict[str, Any]]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found


@contextlib.contextmanager
def ray_cluster_running() -> Iterator[RayCluster]:
    """Start a cluster, and end it with its folder."""
    # Sockets in the folder have names of at most 107 characters; pytest's folder names are too
    # long.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
