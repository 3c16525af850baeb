"""A chat from question to question."""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.chat.answer import ChatAnswer, NoAnswerError, fetch_answer
from appliance.chat.dialogue import Turn
from appliance.chat.orders import follow
from appliance.chat.screen import ChatScreen
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from appliance.chat.answer import AnswerSource
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.question_line import QuestionLine


@dataclass(slots=True)
class ChatSession:
    """A conversation with a model on a screen.

    Attributes:
        context_length: the model's; None if unknown.
        where: description of the model and its place.
        shows_stats: show the speed after each answer.
    """

    source: AnswerSource
    conversation: Dialogue
    models: tuple[str, ...]
    context_length: int | None
    where: str = ""
    screen: ChatScreen = field(default_factory=ChatScreen)
    shows_stats: bool = True

    def ask(self, question: str) -> None:
        """Ask a question and show the answer; Ctrl-C stops it and keeps the received part.

        Raises:
            NoAnswerError: there is no answer; drops the question from the conversation.
        """
        answer = ChatAnswer()
        body = self.conversation.body(question)
        try:
            asyncio.run(_until_ctrl_c(fetch_answer(self.source, body, answer, self.screen.piece)))
        except asyncio.CancelledError:
            self.screen.end()
            self.screen.note("stopped")
        finally:
            self.screen.end()
        self.conversation.turns.append(Turn(question, answer.text))
        if self.shows_stats and (words := answer.in_words(self.context_length)):
            self.screen.note(words)

    def talk(self, line: QuestionLine) -> None:
        """Read questions and commands until the user leaves."""
        while True:
            try:
                words = line.read()
                if words.startswith("/"):
                    self.screen.note(follow(self, words))
                elif words:
                    self.ask(words)
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("\nCtrl-D or /exit leaves")
            except NoAnswerError as error:
                self.screen.note(f"error: {error}")
                self.screen.note("the question was not kept; /undo and /clear make prompts shorter")
            except ApplianceError as error:
                self.screen.note(f"error: {error}")


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
