"""A conversation: system prompt, turns and sampling; builds the next request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError
from appliance.files import replace_atomically

# Request fields that `/set` may change, and their types.
SAMPLING: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


@dataclass(slots=True)
class Turn:
    """A question and its answer, which the user may have stopped early."""

    question: str
    answer: str = ""


@dataclass(slots=True)
class Dialogue:
    """The context that the model gets with each question.

    Attributes:
        system: the system prompt; empty means the template's own.
        sampling: overrides of the server's defaults, see `SAMPLING`.
    """

    model: str
    system: str = ""
    sampling: dict[str, float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def body(self, question: str) -> dict[str, Any]:
        """Return a streaming request for the question, with all turns so far."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.answer})
        said.append({"role": "user", "content": question})
        return {
            "model": self.model,
            "messages": said,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }

    def set(self, name: str, text: str) -> None:
        """Set a sampling field; an empty text restores the server's default.

        Raises:
            ConfigError: the field is unknown, or the text is no number.
        """
        if name not in SAMPLING:
            raise ConfigError(f"{name!r} is none of {', '.join(SAMPLING)}")
        if not text:
            self.sampling.pop(name, None)
            return
        try:
            self.sampling[name] = SAMPLING[name](text)
        except ValueError:
            raise ConfigError(f"{name} must be a number; got {text!r}") from None

    def save(self, path: Path) -> None:
        """Write system prompt and turns, readable only by this user.

        Raises:
            ConfigError: writing failed.
        """
        turns = [{"question": turn.question, "answer": turn.answer} for turn in self.turns]
        text = json.dumps({"system": self.system, "turns": turns}, indent=2, ensure_ascii=False)
        try:
            with replace_atomically(path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace system prompt and turns by a file's.

        Raises:
            ConfigError: the file is unreadable or holds no conversation.
        """
        try:
            found = json.loads(path.read_text())
            turns = [Turn(str(one["question"]), str(one["answer"])) for one in found["turns"]]
            system = str(found["system"])
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} holds no conversation that /save wrote") from None
        self.system, self.turns = system, turns
