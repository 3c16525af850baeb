"""Writes answers to the terminal without control characters from the model."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TextIO

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


@dataclass(slots=True)
class ChatScreen:
    """The terminal or pipe that shows a chat.

    Attributes:
        out: receives answers.
        is_terminal: it shows colors; otherwise writes only text.
    """

    out: TextIO = field(default_factory=lambda: sys.stdout)
    is_terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    _in_thought: bool = False
    _at_start: bool = True  # of a line

    def piece(self, text: str, is_thought: bool) -> None:
        """Write a piece of an answer; dim thoughts, or omit them in a pipe."""
        if is_thought and not self.is_terminal:
            return
        if is_thought is not self._in_thought:
            self._switch(is_thought)
        text = printable(text)
        self.out.write(text)
        self.out.flush()
        self._at_start = text.endswith("\n") if text else self._at_start

    def end(self) -> None:
        """Finish an answer's last line."""
        if self._in_thought:
            self._switch(False)
        elif not self._at_start:
            self.out.write("\n")
        self.out.flush()
        self._at_start = True

    def note(self, text: str) -> None:
        """Write a message of the program."""
        for line in text.splitlines():
            words = printable(line)
            self.out.write(f"{_DIM}{words}{_RESET}\n" if self.is_terminal else f"{words}\n")
        self.out.flush()

    def _switch(self, is_thought: bool) -> None:
        self.out.write(_DIM if is_thought else f"{_RESET}\n")
        self._in_thought, self._at_start = is_thought, True


def prompt_text(words: str) -> str:
    """Return a bold prompt whose width readline can measure."""
    return f"\x01{_BOLD}\x02{words}\x01{_RESET}\x02"


def printable(text: str) -> str:
    """Remove control characters except line ends and tabs."""
    return _CONTROLS.sub("", text)
