"""A chat from question to question."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.chat.answer import ChatAnswer, NoAnswerError, fetch_answer
from appliance.chat.dialogue import Turn
from appliance.chat.orders import follow
from appliance.chat.screen import ChatScreen
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.question_line import QuestionLine
    from appliance.tui.server import Server


@dataclass(slots=True)
class ChatSession:
    """A conversation with a server, on a screen.

    Attributes:
        models: that the server has.
        context_length: of the model; None if the server did not say.
        shows_stats: each answer is followed by a line with its speed.
    """

    server: Server
    conversation: Dialogue
    models: tuple[str, ...]
    context_length: int | None
    screen: ChatScreen = field(default_factory=ChatScreen)
    shows_stats: bool = True

    def ask(self, question: str) -> None:
        """Ask a question and show the answer; Ctrl-C stops it, and keeps what came.

        Raises:
            NoAnswerError: the server gave none; the question is not part of the conversation.
        """
        answer = ChatAnswer()
        body = self.conversation.body(question)
        try:
            asyncio.run(fetch_answer(self.server, body, answer, self.screen.piece))
        except KeyboardInterrupt:
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
