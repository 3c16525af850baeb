"""Commands of `appliance` in processes of their own, forked from one that imported them once.

tests/e2e starts commands as a person does, imports included; forks spare each case that cost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from support.runs.waiting import LIMIT

SERVE = (
    "appliance.commands.serve",
    "appliance.hub.found_model",
    "appliance.server.app",
    "appliance.server.api_server",
    "appliance.tokenizer",
    "pydantic.types",  # for typer
    "tokenizers",
    "uvicorn",
)

MAIN = "from appliance.__main__ import main; main()"  # as `python -m appliance`
Finished = subprocess.CompletedProcess[str]


class ForkedCommands:
    """Runs commands one after another."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._streams = folder / "stdout", folder / "stderr"

    def run(self, *arguments: str | Path, code: str = MAIN, **environment: str) -> Finished:
        """Run `appliance` with these arguments; return its status and output.

        Args:
            arguments: for `sys.argv`.
            code: other Python code to run instead.
            environment: variables besides those of all commands.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = ["appliance", *map(str, arguments)]
        order = [code, words, environment, *map(str, self._streams)]
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = os.waitstatus_to_exitcode(int(self._process.stdout.readline()))
        written = [stream.read_text() for stream in self._streams]
        return subprocess.CompletedProcess(words, status, *written)


@contextmanager
def forked_commands(
    folder: Path, modules: Sequence[str] = SERVE, again: str = "", **environment: str
) -> Iterator[ForkedCommands]:
    """Start the process to fork from.

    Args:
        folder: for the commands' output.
        modules: to import once, since each command would import them.
        again: a package among them that each command imports again, with its environment.
        environment: the commands' variables besides this process's.
    """
    with subprocess.Popen(
        [sys.executable, __file__, again, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        yield ForkedCommands(process, folder)


def serve_forks(again: str, modules: Sequence[str]) -> None:
    for name in modules:
        import_module(name)
    for name in [name for name in sys.modules if again and name.split(".")[0] == again]:
        del sys.modules[name]
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            become(*order)
        print(os.waitpid(child, 0)[1], flush=True)  # noqa: T201 - the answer


def become(
    code: str, words: list[str], environment: dict[str, str], stdout: str, stderr: str
) -> NoReturn:
    """Run code in this process as its main program, and end with its status."""
    signal.alarm(int(LIMIT))
    writing = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    for stream, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, writing),
        (2, stderr, writing),
    ):
        os.dup2(os.open(name, flags), stream)
    os.environ.update(environment)
    sys.argv = words
    status = 0
    try:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        status = 1 if isinstance(ended.code, str) else int(ended.code or 0)
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve_forks(sys.argv[1], sys.argv[2:])
