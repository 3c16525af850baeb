"""Requests an answer and passes on its pieces as they arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from appliance.errors import ApplianceError
from appliance.tui.sse import EventDecoder

if TYPE_CHECKING:
    from appliance.tui.server import Server

Show = Callable[[str, bool], None]  # a piece of text; True for a thought

_PATIENCE = 600.0  # seconds between two pieces; long, for long prompts and loading models


class NoAnswerError(ApplianceError):
    """The model gave no complete answer; the message says why and what to do.

    Args:
        code: the API's machine-readable word, if there is one.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class ChatAnswer:
    """An answer so far, with its times in seconds.

    Attributes:
        text: without thoughts.
        finish_reason: empty if the user stopped it.
    """

    text: str = ""
    finish_reason: str = ""
    begin: float = 0.0
    first: float | None = None
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def in_words(self, context_length: int | None) -> str:
        """Describe speed and size in one line; empty without an answer."""
        if self.first is None:
            return ""
        words = []
        if self.completion_tokens:
            words.append(f"{self.completion_tokens:,} tokens")
            if self.completion_tokens > 1 and self.last > self.first:
                rate = (self.completion_tokens - 1) / (self.last - self.first)
                words.append(f"{rate:,.1f} tokens/s")
        words.append(f"first token {self.first - self.begin:.2f} s")
        if self.prompt_tokens:
            cached = f", {self.cached_tokens:,} of them cached" if self.cached_tokens else ""
            words.append(f"prompt {self.prompt_tokens:,}{cached}")
            total = self.prompt_tokens + self.completion_tokens
            if context_length:
                words.append(f"{total / context_length:.0%} of the context")
        if self.finish_reason == "length":
            words.append("cut off at the limit of tokens")
        return "; ".join(words)


class AnswerSource(Protocol):
    """A source of answers: a server, or a model in this process."""

    def events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the answer to a chat in OpenAI's form, as server-sent events.

        Raises:
            ApplianceError: the request is refused or the answer breaks off.
        """
        ...


class ServerSource:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the server's answer.

        Raises:
            NoAnswerError: the server refuses, breaks off or is unreachable.
        """
        server = self._server
        try:
            async with (
                server.client(_PATIENCE) as client,
                client.stream("POST", server.path("/v1/chat/completions"), json=body) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for received in response.aiter_bytes():
                    yield received
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise NoAnswerError(f"{server.url} did not answer to the end: {why}") from error


async def fetch_answer(
    source: AnswerSource, body: dict[str, Any], answer: ChatAnswer, show: Show
) -> None:
    """Stream an answer into `answer`, which keeps the received part if this is cancelled.

    Raises:
        NoAnswerError: the request is refused or the answer breaks off.
    """
    answer.begin = time.monotonic()
    decoder = EventDecoder()
    try:
        async with aclosing(source.events(body)) as events:
            async for received in events:
                for _, data in decoder.feed(received):
                    if data != b"[DONE]":
                        _take(json.loads(data), answer, show)
    except ValueError as error:
        raise NoAnswerError(f"the answer cannot be read: {error}") from error
    except NoAnswerError:
        raise
    except ApplianceError as error:
        raise NoAnswerError(str(error), getattr(error, "code", None)) from error


def _take(event: dict[str, Any], answer: ChatAnswer, show: Show) -> None:
    if "error" in event:
        error = event["error"]
        raise NoAnswerError(str(error.get("message", error)), error.get("code"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
        if thought or text:
            answer.last = time.monotonic()
            answer.first = answer.first or answer.last
        if thought:
            show(thought, True)
        if text:
            answer.text += text
            show(text, False)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.completion_tokens = usage.get("completion_tokens", 0)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(status: int, body: bytes) -> NoAnswerError:
    code = None
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    hint = "; set APPLIANCE_API_KEY to a key that it knows" if status in (401, 403) else ""
    return NoAnswerError(f"the server answered {status}: {message}{hint}", code)
