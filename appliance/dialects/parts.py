"""The parts of an answer."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the user."""

    text: str


class Thought(msgspec.Struct, frozen=True, gc=False):
    """Text of a thought."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments of the latest call: JSON, once all pieces are together."""

    text: str


Part = Content | Thought | CallBegin | CallArguments
