"""A conversation: system prompt, turns, pictures and sampling; builds the next request."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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


_KINDS = {"jpg": "jpeg", "tif": "tiff"}  # of an image's media type, where the suffix is another
_SUFFIXES = (*_KINDS, "png", "jpeg", "webp", "gif", "bmp", "tiff", "avif")
# A path as terminals write it for a dropped file: quoted, or with a backslash before blanks.
_DROPPED = re.compile(
    r"""(?<!\S)('(?:file://|[/~])[^']*'|"(?:file://|[/~])[^"]*"|(?:file://|[/~])(?:\\.|\S)*)[ ]?"""
)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture that goes with a question.

    Attributes:
        url: a data URL with the file's bytes.
    """

    name: str
    url: str

    @classmethod
    def of_file(cls, path: Path) -> Attachment:
        """Read a picture's file.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        suffix = path.suffix.lower().removeprefix(".")
        kind = _KINDS.get(suffix, suffix or "png")
        return cls(path.name, f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def path_of(text: str) -> Path:
    """Return the path that a text names, which may be a file: URL."""
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"))
    return Path(os.path.expanduser(text))  # Path's own raises where there is no such user


def without_dropped(words: str) -> tuple[str, list[Path]]:
    """Return a question without the paths of pictures that were dropped into it, and these.

    A dropped path has blanks or the ends of the question around it, of which one blank goes too.
    """
    found: list[Path] = []

    def keep(match: re.Match[str]) -> str:
        text = match[1]
        path = path_of(text[1:-1] if text[0] in "'\"" else re.sub(r"\\(.)", r"\1", text))
        is_picture = path.suffix.lower().removeprefix(".") in _SUFFIXES
        if not (is_picture and os.path.isfile(path)):
            return match.group()
        found.append(path)
        return ""

    return _DROPPED.sub(keep, words).strip(), found


@dataclass(slots=True)
class Turn:
    """A question, and its answer, which the user may have stopped early."""

    question: str
    answer: str = ""
    pictures: tuple[Attachment, ...] = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The question as a message's content, pictures first."""
        if not self.pictures:
            return self.question
        return [
            *({"type": "image_url", "image_url": {"url": one.url}} for one in self.pictures),
            {"type": "text", "text": self.question},
        ]


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

    def body(self, asked: Turn) -> dict[str, Any]:
        """Return a streaming request for a turn's question, with all turns so far."""
        said: list[dict[str, Any]] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        for turn in self.turns:
            said.append({"role": "user", "content": turn.content})
            said.append({"role": "assistant", "content": turn.answer})
        said.append({"role": "user", "content": asked.content})
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
        turns = list(map(asdict, self.turns))
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
            turns = [_turn(one) for one in found["turns"]]
            system = str(found["system"])
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} holds no conversation that /save wrote") from None
        self.system, self.turns = system, turns


def _turn(saved: dict[str, Any]) -> Turn:
    pictures = saved.get("pictures", ())
    attached = tuple(Attachment(str(one["name"]), str(one["url"])) for one in pictures)
    return Turn(str(saved["question"]), str(saved["answer"]), attached)
