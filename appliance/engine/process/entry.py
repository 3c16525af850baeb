"""Starts the engine process: takes inherited descriptors and never outlives the parent."""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from appliance.config import cache_dir
from appliance.engine.process.launch import DUMP_STACKS_SIGNAL
from appliance.engine.process.metadata import map_metadata
from appliance.engine.process.worker import run_worker
from appliance.runtime import die_with_parent

if TYPE_CHECKING:
    from appliance.engine.process.engine_core import LoadEngine


def run_engine_process(arguments: Sequence[str], find_loader: Callable[[], LoadEngine]) -> int:
    """Serve on the descriptors that the supervisor passes; return the exit code."""
    parser = argparse.ArgumentParser(prog="appliance.engine.process")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--metadata", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    keep_compiled_kernels()
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS_SIGNAL, all_threads=True)
    with socket.socket(fileno=options.socket) as sock:
        return run_worker(sock, map_metadata(options.metadata, writable=True), find_loader)


def keep_compiled_kernels() -> None:
    """Put compiled GPU kernels into the cache folder, unless the user set one."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
