"""`appliance serve --top`: runs the server in another process and its dashboard here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from appliance.commands.serve_banner import STOPPED
from appliance.config import local_url, own_key
from appliance.tui.run import TopOptions, require_terminal, run_dashboard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.config import ServerConfig

_LAST_LINES = 20
_PATIENCE = 45.0  # seconds for the server to drain


def serve_with_dashboard(server: ServerConfig, arguments: Sequence[str]) -> int:
    """Serve with the dashboard.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: there is no terminal to draw on.
    """
    require_terminal()
    key, environment = own_key(server)
    descriptor, name = tempfile.mkstemp(prefix="appliance-serve-", suffix=".log")
    log = Path(name)
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "appliance", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # the dashboard handles the terminal's signals
        )
    try:
        code = run_dashboard(
            local_url(server.host, server.port, tls=server.tls_cert is not None),
            key,
            TopOptions(ca_file=server.tls_cert),
            while_true=lambda: process.poll() is None,
        )
    finally:
        ended_by_itself = process.poll() is not None
        _end(process)
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    if not ended_by_itself:
        log.unlink(missing_ok=True)
        for line in lines:
            if line.startswith(STOPPED):
                typer.echo(line, err=True)
        return code
    typer.echo("\n".join(["the server ended; the last it said:", *lines, f"all: {log}"]), err=True)
    return process.returncode if process.returncode > 0 else 1


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
