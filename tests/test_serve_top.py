"""`serve --top`: its output when the dashboard is closed, and the server with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs.waiting import wait_until

from appliance.commands import serve_top
from appliance.config import ServerConfig

SERVER = """#!/bin/sh
trap 'echo "INFO any line of a log"; echo "stopped; 3 requests served; nothing kept"; exit 0' TERM
echo "a banner"
touch "$0.runs"
while :; do sleep 0.02; done
"""


def test_what_the_server_said_at_its_end_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "server"
    program.write_text(SERVER)
    program.chmod(0o755)

    def look(*arguments: Any, **options: Any) -> int:
        wait_until(program.with_name("server.runs").exists)
        return 0

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(serve_top, "require_terminal", lambda: None)
    monkeypatch.setattr(serve_top, "run_dashboard", look)
    assert serve_top.serve_with_dashboard(ServerConfig(), ["serve"]) == 0
    assert capsys.readouterr().err == "stopped; 3 requests served; nothing kept\n"
