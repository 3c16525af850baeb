"""A driver is here and torch cannot use its card: each door says so, in the same words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs.stub_driver import DRIVERS, GTX_1080_TI

from tests.e2e.conftest import Server


def appliance(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder of libraries, which a test replaces as an update of the driver would."""
    DRIVERS["535"].libraries(tmp_path / "535")
    replace(DRIVERS["580"], cards=(GTX_1080_TI,)).libraries(tmp_path / "old card")
    folder = tmp_path / "driver"
    folder.symlink_to(tmp_path / "535")
    return folder


def test_every_door_says_why(smollm2_gguf: Path, tmp_path: Path, driver: Path) -> None:
    libraries = {"LD_LIBRARY_PATH": str(driver)}
    server = Server(tmp_path / "log", str(smollm2_gguf), **libraries)
    try:
        why = server.client.get("/health").json()["unused_gpu"]
        assert why.startswith("no GPU is used: ")
        (logged,) = [line for line in server.log.splitlines() if "WARNING" in line]
        assert logged.endswith(why)
        assert f"note       {why}\n" in server.log

        asked = appliance("doctor", "--json", "--quick", "--url", server.url, **libraries)
        found = {one["name"]: one for one in json.loads(asked.stdout)["findings"]}
        here = found["GPU use"]
        assert (here["status"], f"no GPU is used: {here['found']}; {here['fix']}") == ("fail", why)
        there = found["server's GPU"]
        assert (there["status"], f"{there['found']}; {there['fix']}") == ("warn", why)

        refused = appliance("serve", str(smollm2_gguf), "--device", "cuda", **libraries)
        assert refused.returncode == 2
        assert why.removeprefix("no GPU is used: ") in refused.stderr
        fitted = appliance("fit", str(smollm2_gguf), "--no-speed", **libraries)
        assert fitted.stderr == f"note: {why}\n"
        fitted = appliance("fit", str(smollm2_gguf), "--no-speed", "--gpu", "RTX 3090", **libraries)
        assert (fitted.returncode, fitted.stderr) == (0, "")

        driver.unlink()
        driver.symlink_to(tmp_path / "old card")
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: server.client.get("/health").json().get("restarts") == 1)
        why = server.client.get("/health").json()["unused_gpu"]
        assert "the kernels need compute capability 8.0, and here is NVIDIA GeForce GTX 1080" in why
        assert why in server.log
    finally:
        server.stop()


def test_who_asks_for_the_cpu_hears_nothing(
    smollm2_gguf: Path, tmp_path: Path, driver: Path
) -> None:
    chosen = ("--device", "cpu")
    server = Server(tmp_path / "log", str(smollm2_gguf), *chosen, LD_LIBRARY_PATH=str(driver))
    try:
        assert server.client.get("/health").json() == {"status": "ok"}
        assert "GPU" not in server.log
    finally:
        server.stop()
