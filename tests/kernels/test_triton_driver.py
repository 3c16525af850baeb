"""Triton's way to the driver where ldconfig's cache, the compiler or libcuda is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.stub_driver import DRIVERS

Open = Callable[..., list[str]]

# Stands in for a machine whose loader knows libcuda while ldconfig's cache does not, as on NixOS.
PROGRAM = """
import ctypes, subprocess, sys
import torch

torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (8, 6)
import triton
from triton.backends.nvidia import driver

listed = subprocess.check_output
def no_cache(command, **more):
    if command[0] == "/sbin/ldconfig":
        if sys.argv[2] == "no ldconfig":
            raise FileNotFoundError(2, "No such file or directory", "/sbin/ldconfig")
        return b""
    return listed(command, **more)
driver.subprocess.check_output = no_cache

from appliance.errors import ConfigError
from appliance.kernels.gpu.target import open_driver

if sys.argv[1] != "no libcuda":
    ctypes.CDLL(sys.argv[1])
try:
    driver.libcuda_dirs()
except (AssertionError, FileNotFoundError) as error:
    print("Triton alone:", type(error).__name__)
try:
    open_driver()
except ConfigError as error:
    print(error)
else:
    print(triton.runtime.driver.active.get_current_target().arch)
"""


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    library = DRIVERS["580"].libraries(tmp_path / "lib") / "libcuda.so.1"

    def run(library: str = str(library), ldconfig: str = "empty cache", **more: str) -> list[str]:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), **more}
        for name in ("CC", "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH"):
            environment.pop(name, None)
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, library, ldconfig],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("ldconfig", "error"), [("empty cache", "AssertionError"), ("no ldconfig", "FileNotFoundError")]
)
def test_the_library_that_is_loaded_is_the_one_that_triton_takes(
    opened: Open, ldconfig: str, error: str
) -> None:
    assert opened(ldconfig=ldconfig) == [f"Triton alone: {error}", "86"]
    *_, said = opened("no libcuda", ldconfig)
    assert "set TRITON_LIBCUDA_PATH to the folder that holds libcuda.so.1" in said
    assert "--device cpu" in said


def test_without_a_compiler_it_is_said_what_to_install(opened: Open, tmp_path: Path) -> None:
    said = opened(PATH=str(tmp_path))[-1]
    assert said.startswith("Triton cannot build what launches kernels on the GPU: Failed to find C")
    assert "gcc and python3-dev" in said
