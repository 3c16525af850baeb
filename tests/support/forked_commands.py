"""Commands of `appliance` in processes of their own, forked from one that imported them once.

A start as a person makes it, with its imports, is in tests/e2e; here it is left out of each case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from waiting import LIMIT

IMPORTED = (
    "appliance.commands.serve",
    "appliance.found_model",
    "appliance.server.app",
    "appliance.server.serve",
    "appliance.tokenizer",
    "pydantic.types",  # for typer
    "tokenizers",
    "uvicorn",
)


class ForkedCommands:
    """Runs one command after the other."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Return how `appliance` with these arguments ended; both streams are in `stderr`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = ["appliance", *map(str, arguments)]
        self._process.stdin.write(json.dumps([str(self._log), words]) + "\n")
        self._process.stdin.flush()
        status = os.waitstatus_to_exitcode(int(self._process.stdout.readline()))
        return subprocess.CompletedProcess(words, status, stderr=self._log.read_text())


@contextmanager
def forked_commands(folder: Path) -> Iterator[ForkedCommands]:
    """Start the process to fork from, which writes a command's log into the folder."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield ForkedCommands(process, folder / "forked.log")


def serve_forks() -> None:
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        log, words = json.loads(line)
        child = os.fork()
        if not child:
            become(log, words)
        print(os.waitpid(child, 0)[1], flush=True)  # noqa: T201 - the answer


def become(log: str, words: list[str]) -> NoReturn:
    """Run a command in this process as `python -m appliance` does, and end with its status."""
    from appliance.__main__ import main

    signal.alarm(int(LIMIT))
    written = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream, flags in ((0, os.O_RDONLY), (1, None), (2, None)):
        os.dup2(written if flags is None else os.open(os.devnull, flags), stream)
    sys.argv = words
    status = 1
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve_forks()
