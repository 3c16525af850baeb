"""Formats an answer as Ollama's lines of JSON, streamed or single."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import UNSET

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.engine.nouns.request import FinishReason
from appliance.server.http.frames import line_frame
from appliance.server.ollama.answers import (
    AnsweredFunction,
    ChatLine,
    GenerateLine,
    OllamaAnsweredCall,
    OllamaMessage,
)
from appliance.server.openai.logprobs import chat_logprobs
from appliance.server.requests.tools import arguments_of, new_call_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice

NANOSECONDS = 10**9

LineT = TypeVar("LineT", ChatLine, GenerateLine)


@dataclass(frozen=True, slots=True)
class LineContent:
    """Content of some parts of an answer."""

    content: str
    thought: str
    calls: list[OllamaAnsweredCall]
    tokens: Sequence[TokenLogprobs] = ()  # if log probabilities are reported


def chat_line(model: str, found: LineContent) -> ChatLine:
    message = OllamaMessage(content=found.content, thinking=found.thought or UNSET)
    if found.calls:
        message.tool_calls = found.calls
    return ChatLine(model=model, created_at=now(), message=message)


def generate_line(model: str, found: LineContent) -> GenerateLine:
    """Make a line of generated text; it has no calls."""
    return GenerateLine(
        model=model,
        created_at=now(),
        response=found.content,
        thinking=found.thought or UNSET,
    )


class LineStream(Generic[LineT]):
    """Makes lines of one answer.

    Args:
        make: builds a line from content, without an end.
        model: the name in the request.
    """

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        make: Callable[[str, LineContent], LineT],
        model: str,
    ) -> None:
        self._answer = answer
        self._make: Callable[[str, LineContent], LineT] = make
        self._model = model
        self._tokenizer = exchange.tokenizer
        self._call: tuple[str, list[str]] | None = None  # the open call: name and arguments
        self._num_calls = 0

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield final lines, with whole calls; the last line has the counts."""
        reason = ""
        async for pieces in self._answer.pieces():
            frames = b""
            for piece in pieces:
                ended = piece.finish_reason is not None
                found = self._find(piece.all_parts, piece.tokens, ended=ended)
                if found.content or found.thought or found.calls or found.tokens:
                    frames += line_frame(self._line(found))
                if piece.finish_reason is not None:
                    reason = piece.finish_reason.value
            if frames:
                yield frames
        yield line_frame(self._end(self._line(LineContent("", "", [])), reason))

    def whole(self, wholes: Sequence[FinishedChoice]) -> LineT:
        (whole,) = wholes
        found = self._find(whole.all_parts, whole.tokens, ended=True)
        return self._end(self._line(found), whole.finish_reason)

    def _line(self, found: LineContent) -> LineT:
        line = self._make(self._model, found)
        if found.tokens:
            line.logprobs = chat_logprobs(found.tokens, self._tokenizer).content
        return line

    def _find(
        self, parts: Iterable[Part], tokens: Sequence[TokenLogprobs], *, ended: bool
    ) -> LineContent:
        content, thought = "", ""
        calls: list[OllamaAnsweredCall] = []
        for part in parts:
            match part:
                case CallArguments(text):
                    assert self._call is not None
                    self._call[1].append(text)
                    continue
                case Content(text):
                    content += text
                case Thought(text):
                    thought += text
            content += self._end_call(calls)
            if isinstance(part, CallBegin):
                self._call = (part.name, [])
        if ended:
            content += self._end_call(calls)
        return LineContent(content, thought, calls, tokens)

    def _end_call(self, calls: list[OllamaAnsweredCall]) -> str:
        """Add the open call; return its text instead if it is cut off and no object."""
        if self._call is None:
            return ""
        (name, pieces), self._call = self._call, None
        text = "".join(pieces)
        arguments = arguments_of(text)
        if arguments is None:
            return f"{name} {text}"
        function = AnsweredFunction(index=self._num_calls, name=name, arguments=arguments)
        short = self._tokenizer.dialect.form.short_ids
        calls.append(OllamaAnsweredCall(id=new_call_id(short=short), function=function))
        self._num_calls += 1
        return ""

    def _end(self, line: LineT, reason: str) -> LineT:
        answer = self._answer
        seconds = answer.seconds
        line.done = True
        line.done_reason = "stop" if reason == FinishReason.STOP.value else "length"
        line.total_duration = round(seconds.total * NANOSECONDS)
        line.load_duration = 0
        line.prompt_eval_count = answer.prompt_tokens
        line.prompt_eval_duration = round(seconds.prefill * NANOSECONDS)
        line.eval_count = answer.completion_tokens
        line.eval_duration = round(seconds.decode * NANOSECONDS)
        return line


def now() -> str:
    """Return the current time in Ollama's format."""
    return written(datetime.now(UTC))


def written(moment: datetime) -> str:
    """Format a UTC time as Ollama does."""
    return moment.isoformat().replace("+00:00", "Z")
