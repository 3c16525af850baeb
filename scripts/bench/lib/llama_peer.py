"""llama.cpp in a process of its own, see `llama_in_process.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("llama_in_process.py")


class Peer:
    """A running process.

    Args:
        folder: has the package xllamacpp.
        settings: as `llama_in_process.py` takes them.
    """

    def __init__(
        self, folder: Path, model: Path, threads: int, slots: int, **settings: object
    ) -> None:
        numbers = str(threads), str(slots)
        command = [sys.executable, str(PROGRAM), str(model), *numbers, json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(folder)},
            text=True,
        )
        self.about = self._read()

    def ask(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answer of each stream."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = self._read()
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the peer ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, which does not always end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
