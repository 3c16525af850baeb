"""Questions to a real server whose engine repeats its prompt, or follows a script."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS
from support.runs.waiting import until

from appliance.chat.answer import ChatAnswer, NoAnswerError, ServerSource, fetch_answer
from appliance.chat.dialogue import Dialogue, Turn
from appliance.chat.screen import ChatScreen, printable
from appliance.chat.session import ORDERS, ChatSession, follow
from appliance.errors import ConfigError
from appliance.tui.server import Server

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Running, Serve


def session_with(url: str, *, is_terminal: bool = False) -> ChatSession:
    screen = ChatScreen(io.StringIO(), is_terminal)
    source = ServerSource(Server.at(url, None))
    return ChatSession(source, Dialogue("echo"), ("echo",), 512, screen=screen)


def shown(session: ChatSession) -> str:
    out = session.screen.out
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def lines(*words: str | type[BaseException]) -> Any:
    """A line that is typed into, like `QuestionLine`; at its end the user leaves."""

    class Typed:
        left: Iterator[str | type[BaseException]] = iter(words)

        def read(self) -> str:
            word = next(self.left, EOFError)
            if isinstance(word, str):
                return word
            raise word

    return Typed()


async def test_answers_follow_questions(serve: Serve) -> None:
    async with serve() as running:
        session = session_with(running.url)
        await asyncio.to_thread(session.talk, lines("hé", KeyboardInterrupt, "more", "/undo"))
        await until(running.idle)
    assert shown(session).startswith("user\nhé\n")
    assert "tokens/s; first token" in shown(session)
    assert "Ctrl-D or /exit leaves" in shown(session)
    assert session.conversation.turns == [Turn("hé", "user\nhé")]
    assert "taken back: more" in shown(session)


async def test_a_question_that_is_refused_is_not_kept(serve: Serve) -> None:
    async with serve() as running:
        session = session_with(running.url)
        words = ("x" * 600, "/retry", "fits", "/set temperature 9", "/retry")
        await asyncio.to_thread(session.talk, lines(*words))
    assert session.conversation.turns == [Turn("fits", "user\nfits")]
    assert "the server answered 400" in shown(session)
    assert "nothing to ask again" in shown(session)


async def test_a_server_that_is_gone(serve: Serve) -> None:
    session = session_with("http://127.0.0.1:9")
    with pytest.raises(NoAnswerError, match="did not answer to the end"):
        await asyncio.to_thread(session.ask, "hi")


async def test_thoughts_are_dim_and_not_for_pipes(
    serve: Serve, tokenizer_with: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"says": "<think>hm</think>Yes\x1b[2J!"}]))
    async with serve(f"script={script}", tokenizer=tokenizer_with(TOOLS)) as running:
        terminal, pipe = session_with(running.url, is_terminal=True), session_with(running.url)
        for session in (terminal, pipe):
            session.shows_stats = False
            await asyncio.to_thread(session.ask, "hi")
    assert shown(terminal) == "\x1b[2mhm\x1b[0m\nYes[2J!\n"
    assert shown(pipe) == "Yes[2J!\n"
    assert terminal.conversation.turns[0].answer == "Yes\x1b[2J!"


async def stopped(running: Running, answer: ChatAnswer) -> None:
    """Cancel an answer once its first piece has arrived, as Ctrl-C does."""
    came = asyncio.Event()
    body = Dialogue("echo").body(Turn("ab" * 100))
    source = ServerSource(Server.at(running.url, None))
    asking = asyncio.create_task(
        fetch_answer(source, body, answer, lambda text, is_thought: came.set())
    )
    await came.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_stopped_answer_keeps_what_came_and_frees_the_engine(
    serve: Serve, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    async with serve(f"holds_at=260 until={gate}") as running:
        answer = ChatAnswer()
        await stopped(running, answer)
        await until(running.idle)
    assert answer.text
    assert "user\nabab".startswith(answer.text[:9])
    assert answer.finish_reason == ""


def test_every_order_is_in_the_help_and_wrong_ones_are_refused() -> None:
    session = session_with("http://127.0.0.1:9")
    text = follow(session, "/help")
    assert all(word in text for word in ORDERS)
    assert max(map(len, text.splitlines())) <= 100
    for line, says in (
        ("/sytem x", "did you mean '/system'"),
        ("/model other", "it has echo"),
        ("/save", "name a file"),
        ("/set heat 1", "none of temperature"),
    ):
        with pytest.raises(ConfigError, match=says):
            follow(session, line)
    with pytest.raises(EOFError):
        follow(session, "/exit")


def test_orders_change_the_conversation(tmp_path: Path) -> None:
    session = session_with("http://127.0.0.1:9")
    talk = session.conversation
    assert follow(session, "/system Be kind.") == "system prompt: Be kind."
    assert "top_k 4" in follow(session, "/set top_k 4")
    talk.turns.append(Turn("a", "b"))
    follow(session, f"/save {tmp_path}/talk")
    follow(session, "/clear")
    assert (talk.turns, talk.system) == ([], "Be kind.")
    assert "1 questions" in follow(session, f"/load {tmp_path}/talk")
    assert talk.turns == [Turn("a", "b")]
    follow(session, "/system none")
    assert talk.system == ""
    follow(session, "/stats")
    assert not session.shows_stats


def test_control_characters_never_reach_the_terminal() -> None:
    text = "a\x1b[31m\tb\r\n\x07\x9bc\x7fé🎈"
    assert printable(text) == "a[31m\tb\ncé🎈"


def test_ctrl_c_stops_an_answer_whose_loop_it_does_not_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the signal comes just before the loop waits: it interrupts nothing."""

    async def answer_for_ever(_: ServerSource, __: object, answer: ChatAnswer, show: Any) -> None:
        answer.text = "a piece"
        show(answer.text, False)
        # The loop calls this while it waits, so that this thread handles the signal.
        threading.Timer(0.1, interrupt).start()
        await asyncio.Event().wait()

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setattr("appliance.chat.session.fetch_answer", answer_for_ever)
    session = session_with("http://127.0.0.1:9")
    session.ask("q")
    assert shown(session) == "a piece\nstopped\n"
    assert session.conversation.turns == [Turn("q", "a piece")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_hint_after_a_refusal_speaks_of_its_cause(serve: Serve, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"any")
    async with serve() as running:
        session = session_with(running.url)
        await asyncio.to_thread(session.talk, lines(f"/image {picture}", "What is this?"))
        assert "this model reads texts only" in shown(session)
        assert "the question and its pictures were not kept; /image FILE sends" in shown(session)
        assert "shorter" not in shown(session)

        session = session_with(running.url)
        await asyncio.to_thread(session.talk, lines("x" * 2000))
        assert "/undo and /clear make prompts shorter" in shown(session)

        session = session_with(running.url)
        session.conversation.model = "other"
        await asyncio.to_thread(session.talk, lines("hé"))
        assert shown(session).splitlines()[-1] == "the question was not kept"
