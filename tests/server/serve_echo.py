"""Starts `run_server` as the command line does, with the engine that repeats its prompt."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import log
from appliance.config import load_settings, service_socket
from appliance.errors import ApplianceError
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.server.api_server import run_server
from appliance.server.http import connection
from appliance.server.models.model_state import ModelToServe
from appliance.service.notice import ServiceNotice

if TYPE_CHECKING:
    from appliance.server.api_server import RunningServer


@dataclass
class Found:
    path: Path
    name: str
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


def ready(ready: RunningServer) -> None:
    sys.stdout.write(f"ready {ready.url} {ready.name} {ready.info.num_blocks}\n")
    sys.stdout.flush()


def progress(stage: str, done: int, total: int) -> None:
    sys.stdout.write(f"progress {stage} {done} {total}\n")
    sys.stdout.flush()


def main(folder: str, echo: str, port: str, knobs: str) -> int:
    log.configure()
    if knobs.startswith("header_seconds="):
        connection.HEADER_SECONDS = float(knobs.split()[0].partition("=")[2])
    # By default only the test itself ends a stream.
    drain_timeout = float(os.environ.get("APPLIANCE_DRAIN_TIMEOUT", "3600"))
    settings = load_settings({"port": int(port), "drain_timeout": drain_timeout})
    try:
        run_server(
            settings,
            [ModelToServe(Found(Path(folder), "echo"), settings.engine)],
            on_progress=progress,
            on_ready=ready,
            engine_command=(sys.executable, echo, knobs),
            notice=ServiceNotice(service_socket()),
        )
    except ApplianceError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
