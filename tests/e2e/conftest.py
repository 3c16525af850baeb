"""`appliance serve` as a process under test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.runs.waiting import LIMIT, Found, wait_until


class Server:
    """`appliance serve` as a person starts it, on a free port."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "appliance", "serve", "--port", "0", *arguments],
                stderr=stream,
                stdout=stream,
                env={"APPLIANCE_KV_DISK": "off", **os.environ, **environment},
            )
        self.url = self._wait_for_banner()
        self.client = httpx.Client(base_url=self.url, timeout=LIMIT)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _wait_for_banner(self) -> str:
        def look() -> re.Match[str] | None:
            assert self.process.poll() is None, f"the server did not start:\n{self.log}"
            return re.search(r"endpoint\s+(http://\S+)/v1", self.log)

        try:
            found = self.wait_until(look)
        except AssertionError:
            self.process.kill()
            raise
        assert found is not None
        return found[1]

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        pids = [int(pid) for pid in children.split()]
        return next(
            pid for pid in pids if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text()
        )

    def wait_until(self, condition: Callable[[], Found]) -> Found:
        """Wait until a condition holds; the log shows why it does not."""
        return wait_until(condition, lambda: self.log)

    def gauge(self, name: str) -> float:
        text = self.client.get("/metrics").text
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        assert found is not None, f"no {name} in\n{text}"
        return float(found[1])

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(log, str(smollm2_gguf), "--served-model-name", "small", "--max-queue", "4")
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.stop()
