"""A client's set-up: steps with text to copy, all values quoted for the language they stand in."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_KEY = "none"  # clients insist on some key


@dataclass(frozen=True, slots=True)
class Connection:
    """The values that a client has to know.

    Attributes:
        url: of the server, without `/v1`.
        model: its id in the API.
        key: to send; None if none is wanted.
        context_length: tokens; None if the server did not say.
    """

    url: str
    model: str
    key: str | None = None
    context_length: int | None = None

    @property
    def api(self) -> str:
        """The base URL of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def key_to_send(self) -> str:
        return self.key or NO_KEY


@dataclass(frozen=True, slots=True)
class SetupStep:
    """One step of a set-up.

    Attributes:
        text: to do.
        code: to copy; empty if there is nothing.
        language: of the code: bash, json, yaml, toml, python or javascript.
        file: that the code is meant for; empty for a command.
    """

    text: str
    code: str = ""
    language: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The set-up of one client.

    Attributes:
        title: the client's own name.
        steps: writes the steps for a connection.
        is_elsewhere: the client usually runs on another machine.
    """

    title: str
    steps: Callable[[Connection], tuple[SetupStep, ...]]
    is_elsewhere: bool = False


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def as_literal(text: str) -> str:
    """Quote a text for TOML, YAML, Python and JavaScript alike."""
    return json.dumps(text, ensure_ascii=False)


def with_variables(command: str, **variables: str) -> str:
    """Write a shell command behind the variables of its environment, a line each."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n".join([*lines, command])
