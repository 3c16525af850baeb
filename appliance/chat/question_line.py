"""Reads questions from the keyboard; readline gives editing, history and completion.

A line that ends with a backslash continues, as does text between two lines of triple quotes. Pasted
lines are one question.
"""

from __future__ import annotations

import contextlib
import readline
from collections.abc import Iterable
from pathlib import Path

from appliance.chat.screen import prompt_text

_QUOTES = '"""'
_MOST_LINES = 1000  # in the history


class QuestionLine:
    """The input line.

    Args:
        orders: words to complete, such as `/help`.
        history: file of earlier questions; None keeps none.
    """

    def __init__(self, orders: Iterable[str], history: Path | None) -> None:
        self._orders = sorted(orders)
        self._history = history
        readline.set_completer(self._complete)
        readline.set_completer_delims("")
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_history_length(_MOST_LINES)
        if history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(history)

    def read(self) -> str:
        """Return the next question.

        Raises:
            EOFError: the user is done.
            KeyboardInterrupt: the user discarded the line.
        """
        line = input(prompt_text("> "))
        if line.strip() == _QUOTES:
            lines = []
            while (line := input(prompt_text(". "))).strip() != _QUOTES:
                lines.append(line)
            return "\n".join(lines).strip()
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input(prompt_text('. '))}"
        return line.strip()

    def close(self) -> None:
        """Save the history, readable only by this user."""
        if self._history is None:
            return
        with contextlib.suppress(OSError):  # a full disk does not end the chat
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)

    def _complete(self, text: str, state: int) -> str | None:
        found = [word for word in self._orders if word.startswith(text)] if text else []
        return found[state] if state < len(found) else None
