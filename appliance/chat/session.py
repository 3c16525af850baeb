"""A chat from question to question, and its slash commands."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.chat.answer import ChatAnswer, NoAnswerError, fetch_answer
from appliance.chat.dialogue import SAMPLING, Attachment, Turn, path_of, without_dropped
from appliance.chat.screen import ChatScreen
from appliance.config.setting import nearest
from appliance.errors import ApplianceError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from appliance.chat.answer import AnswerSource
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.question_line import QuestionLine

# Of a request whose pictures are refused.
_PICTURE_CODES = {"invalid_image", "image_too_large", "too_many_images", "unsupported_content"}


@dataclass(slots=True)
class ChatSession:
    """A conversation with a model on a screen.

    Attributes:
        context_length: the model's; None if unknown.
        where: description of the model and its place.
        shows_stats: show the speed after each answer.
        attached: pictures that go with the next question.
    """

    source: AnswerSource
    conversation: Dialogue
    models: tuple[str, ...]
    context_length: int | None
    where: str = ""
    screen: ChatScreen = field(default_factory=ChatScreen)
    shows_stats: bool = True
    attached: list[Attachment] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Ask a question, with the attached pictures, and show the answer.

        Ctrl-C stops it and keeps the received part.

        Raises:
            NoAnswerError: there is no answer; drops the question and its pictures.
        """
        turn = Turn(question, pictures=tuple(self.attached))
        self.attached.clear()
        self._ask(turn)

    def _ask(self, turn: Turn) -> None:
        answer = ChatAnswer()
        body = self.conversation.body(turn)
        try:
            asyncio.run(_until_ctrl_c(fetch_answer(self.source, body, answer, self.screen.piece)))
        except asyncio.CancelledError:
            self.screen.end()
            self.screen.note("stopped")
        finally:
            self.screen.end()
        self.conversation.turns.append(replace(turn, answer=answer.text))
        if self.shows_stats and (words := answer.in_words(self.context_length)):
            self.screen.note(words)

    def talk(self, line: QuestionLine) -> None:
        """Read questions and commands until the user leaves."""
        while True:
            try:
                self._take(line.read())
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("\nCtrl-D or /exit leaves")
            except NoAnswerError as error:
                self.screen.note(f"error: {error}")
                self.screen.note(_kept_out(error.code))
            except ApplianceError as error:
                self.screen.note(f"error: {error}")

    def attach(self, paths: Iterable[Path]) -> str:
        """Send pictures with the next question; return a note on them.

        Raises:
            ConfigError: a file cannot be read.
        """
        self.attached += [Attachment.of_file(path) for path in paths]
        names = ", ".join(one.name for one in self.attached)
        return f"with the next question: {names or 'no picture'}"

    def _take(self, words: str) -> None:
        """Follow a command, attach dropped pictures, or ask."""
        if words.partition(" ")[0] not in ORDERS:
            words, dropped = without_dropped(words)
            if dropped:
                self.screen.note(self.attach(dropped))
        if words.startswith("/"):
            self.screen.note(follow(self, words))
        elif words:
            self.ask(words)


def _kept_out(code: str | None) -> str:
    """Say what became of a question without an answer, and how to go on.

    Args:
        code: why it has none, see `NoAnswerError`.
    """
    if code == "context_length_exceeded":
        return "the question was not kept; /undo and /clear make prompts shorter"
    if code in _PICTURE_CODES:
        return (
            "the question and its pictures were not kept; /image FILE sends another picture, and"
            " /undo takes earlier ones back"
        )
    return "the question was not kept"


async def _until_ctrl_c(answer: Coroutine[None, None, None]) -> None:
    """Await an answer.

    Raises:
        asyncio.CancelledError: on Ctrl-C. `asyncio.run` alone misses one that arrives just before
            its loop waits for the server; a handler in the loop wakes it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    if threading.current_thread() is not threading.main_thread():  # only there do signals arrive
        await answer
        return
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await answer
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Order:
    """A slash command: its argument, its help, and a function that returns the reply."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], str]


def follow(session: ChatSession, line: str) -> str:
    """Run a slash command and return its reply.

    Raises:
        ConfigError: the command is unknown or its argument is wrong.
        EOFError: the user ends the chat.
    """
    word, _, argument = line.partition(" ")
    if word not in ORDERS:
        raise ConfigError(f"there is no {word}{nearest(word, ORDERS)}")
    return ORDERS[word].run(session, argument.strip())


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"{f'{word} {one.argument}':22}{one.help}" for word, one in ORDERS.items()]
    keys = [
        'A line with """ alone begins a text of several lines, another ends it; a line that ends',
        "with \\ goes on, too. A picture's file can be dropped into a question. Ctrl-C stops an",
        "answer, Ctrl-D leaves.",
    ]
    return "\n".join([*lines, "", *keys])


def _system(session: ChatSession, argument: str) -> str:
    talk = session.conversation
    if argument:
        talk.system = "" if argument == "none" else argument
    return f"system prompt: {talk.system or 'none'}"


def _clear(session: ChatSession, argument: str) -> str:
    session.conversation.turns.clear()
    session.attached.clear()
    return "the conversation begins anew"


def _undo(session: ChatSession, argument: str) -> str:
    if not session.conversation.turns:
        return "there is nothing to take back"
    turn = session.conversation.turns.pop()
    return f"taken back: {turn.question}"


def _retry(session: ChatSession, argument: str) -> str:
    if not session.conversation.turns:
        return "there is nothing to ask again"
    turn = session.conversation.turns.pop()
    try:
        session._ask(turn)
    except NoAnswerError:
        session.conversation.turns.append(turn)
        raise
    return ""


def _image(session: ChatSession, argument: str) -> str:
    if argument == "none":
        session.attached.clear()
        return session.attach(())
    if os.path.isfile(path_of(argument)):
        return session.attach([path_of(argument)])
    try:
        return session.attach(map(path_of, shlex.split(argument)))
    except ValueError as error:  # a quotation mark without its pair
        raise ConfigError(f"{argument} cannot be read: {error}") from None


def _set(session: ChatSession, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if name:
        session.conversation.set(name, value.strip())
    chosen = session.conversation.sampling
    shown = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
    return f"{shown or 'all as the server has it'}; there are {', '.join(SAMPLING)}"


def _model(session: ChatSession, argument: str) -> str:
    if argument and argument not in session.models:
        raise ConfigError(f"the server has no {argument!r}; it has {', '.join(session.models)}")
    session.conversation.model = argument or session.conversation.model
    return f"model: {session.conversation.model}; there are {', '.join(session.models)}"


def _save(session: ChatSession, argument: str) -> str:
    path = _path(argument)
    session.conversation.save(path)
    return f"saved in {path}"


def _load(session: ChatSession, argument: str) -> str:
    path = _path(argument)
    session.conversation.load(path)
    return f"{len(session.conversation.turns)} questions and answers from {path}"


def _stats(session: ChatSession, argument: str) -> str:
    session.shows_stats = not session.shows_stats
    return f"the line after each answer is {'shown' if session.shows_stats else 'left out'}"


def _leave(session: ChatSession, argument: str) -> str:
    raise EOFError


def _path(argument: str) -> Path:
    if not argument:
        raise ConfigError("name a file, such as /save talk.json")
    return Path(argument).expanduser()


ORDERS = {
    "/help": Order("", "this list", _help),
    "/system": Order("TEXT", "set the system prompt, or show it; none removes it", _system),
    "/image": Order("FILE", "send a picture with the next question; none takes it back", _image),
    "/set": Order("NAME VALUE", "set a field of sampling; without a value, its default", _set),
    "/model": Order("NAME", "ask another model of the server, or list them", _model),
    "/retry": Order("", "ask the last question again", _retry),
    "/undo": Order("", "take the last question and its answer back", _undo),
    "/clear": Order("", "begin anew, with the same system prompt", _clear),
    "/save": Order("FILE", "write the conversation to a file", _save),
    "/load": Order("FILE", "go on with one", _load),
    "/stats": Order("", "show or hide the line after each answer", _stats),
    "/exit": Order("", "leave", _leave),
}
