"""`appliance chat` with a person's input, in a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from support.runs.waiting import until
from typer.testing import CliRunner

from appliance.cli import app
from tests.server.conftest import byte_tokenizer, forks, serve, tokenizer_folder

if TYPE_CHECKING:
    from tests.server.conftest import Serve

__all__ = ["byte_tokenizer", "forks", "serve", "tokenizer_folder"]


class Typist:
    """A chat in a terminal."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.screen, theirs = pty.openpty()
        os.set_blocking(self.screen, False)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "APPLIANCE_CACHE_DIR": str(home), "TERM": "xterm"},
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    async def sees(self, words: str) -> None:
        """Wait until words appear after everything that was seen before."""

        def look() -> bool:
            with contextlib.suppress(OSError):  # no output yet, or it has ended
                self.text += os.read(self.screen, 65536).decode(errors="replace")
            return words in self.text

        await until(look, lambda: f"{words!r} in {self.text!r}")
        self.text = self.text.partition(words)[2]

    async def leave(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def end(self) -> None:
        os.close(self.screen)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def type_into(tmp_path: Path) -> Iterator[Callable[..., Typist]]:
    """Start a chat, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Typist:
            typist = Typist(tmp_path / "cache", *arguments)
            stack.callback(typist.end)
            return typist

        yield start


async def test_a_chat_in_a_terminal(
    serve: Serve, tmp_path: Path, type_into: Callable[..., Typist]
) -> None:
    gate = tmp_path / "gate"
    async with serve(f"holds_at=450 until={gate}") as running:
        typist = type_into("--url", running.url, "--system", "S")
        await typist.sees("/help lists")
        typist.type("hello\n")
        await typist.sees("system")  # the beginning of the repeated prompt
        await typist.sees("first token")
        typist.type('"""\none\ntwo\n"""\n')
        typist.type("/undo\n")
        await typist.sees("taken back: one")
        await typist.sees("two")
        typist.type("/sys\t long " + "x" * 250 + "\n")
        await typist.sees("system prompt: long")
        typist.type("stop me\n")
        await until(lambda: running.state.engine.num_running == 1)
        await typist.sees("system")
        typist.type("\x03")
        await typist.sees("stopped")
        await until(running.idle)
        typist.type("\x04")
        assert await typist.leave() == 0
    history = tmp_path / "cache" / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


async def test_a_question_in_a_pipe_is_answered_alone(serve: Serve) -> None:
    async with serve() as running:
        arguments = ["chat", "--url", running.url]
        piped = await asyncio.to_thread(CliRunner().invoke, app, arguments, "from a pipe\n")
        given = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "given"])
        wrong = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--model", "x", "q"])
        empty = await asyncio.to_thread(CliRunner().invoke, app, arguments, "  ")
    assert (piped.stdout, piped.exit_code) == ("user\nfrom a pipe\n", 0)
    assert given.stdout == "user\ngiven\n"
    assert "it has echo" in str(wrong.exception)
    assert "the question is empty" in str(empty.exception)


def test_no_server_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    named = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", "hi"])
    assert "start a server with `appliance serve`" in str(named.exception)
    monkeypatch.setenv("APPLIANCE_PORT", "9")
    usual = str(CliRunner().invoke(app, ["chat", "hi"]).exception)
    assert "start a server with `appliance serve`, or run a model here with --model" in usual
    assert "\n" not in usual
    both = CliRunner().invoke(app, ["chat", "--here", "--url", "http://127.0.0.1:9", "hi"])
    assert "leave one out" in str(both.exception)


async def test_a_chat_without_a_server(
    smollm2_gguf: Path, type_into: Callable[..., Typist], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_PORT", "9")
    monkeypatch.setenv("APPLIANCE_CPU_ISA", "scalar")  # so slow that an answer can be stopped
    monkeypatch.setenv("APPLIANCE_MAX_MODEL_LEN", "1024")
    typist = type_into("--model", str(smollm2_gguf))
    await typist.sees("which runs here; /help lists")
    children = psutil.Process(typist.process.pid).children(recursive=True)
    assert any("appliance.engine.process" in one.cmdline() for one in children)
    typist.type("/set max_tokens 3\n")
    await typist.sees("max_tokens 3")
    typist.type("Hello\n")
    await typist.sees("3 tokens")
    await typist.sees("of the context")
    typist.type("/set max_tokens 900\n")
    await typist.sees("max_tokens 900")
    typist.type("Count from one to one thousand, and spell each number.\n")
    await typist.sees("number.\r\n")  # shown as it is typed
    await typist.sees("\x1b[?2004l\r")  # and the line is sent
    await typist.sees(" ")  # text of the answer
    typist.type("\x03")
    await typist.sees("stopped")
    typist.type("/exit\n")
    assert await typist.leave() == 0
    assert not any(one.is_running() for one in children)
