"""The parts of an answer."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Thought(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the latest call's arguments; all pieces together are JSON."""

    text: str


Part = Content | Thought | CallBegin | CallArguments
