"""Frames of one choice of a streamed chat, one part each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.engine.request import FinishReason
from appliance.server.chat_logprobs import chat_logprobs
from appliance.server.frames import FrameTemplate
from appliance.server.responses import CallDelta, CalledFunctionText, ChatChunkChoice, ChatDelta
from appliance.server.tools import new_call_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.server.pieces import Piece
    from appliance.server.responses import ChatLogprobs
    from appliance.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"
_MARK = FrameTemplate.MARK


class ChoiceFrames:
    """Makes frames of one choice's pieces.

    Args:
        alike: frames differ only in the choice, so one can be the template of the next.
    """

    def __init__(
        self,
        number: int,
        tokenizer: Tokenizer,
        frame: Callable[[ChatChunkChoice], bytes],
        *,
        alike: bool,
    ) -> None:
        self._number = number
        self._tokenizer = tokenizer
        self._frame = frame
        self._alike = alike
        self._calls = 0
        self._templates: dict[type[Part], FrameTemplate] = {}  # for the last call's arguments

    def begin(self) -> bytes:
        """Return the first frame, which has only the role."""
        return self._one(ChatDelta(role="assistant", content=""))

    def frames(self, piece: Piece) -> bytes:
        """Return the frames of one piece; the choice's last frame has only the finish reason."""
        frames = b""
        parts = piece.all_parts
        if piece.tokens:  # on the first part, if any is final
            first = self._delta(parts[0]) if parts else ChatDelta(content="")
            frames += self._one(first, chat_logprobs(piece.tokens, self._tokenizer))
            parts = parts[1:]
        for part in parts:
            frames += self._part(part)
        if piece.finish_reason is not None:
            called = self._calls > 0 and not piece.cuts_call
            reason = reason_of(piece.finish_reason.value, called=called)
            frames += self._one(ChatDelta(), None, reason)
        return frames

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegin) or not self._alike:
            return self._one(self._delta(part))
        template = self._templates.get(type(part))
        if template is None:
            template = FrameTemplate(self._one(self._delta(type(part)(_MARK))))
            self._templates[type(part)] = template
        return template.fill(part.text)

    def _delta(self, part: Part) -> ChatDelta:
        match part:
            case Content(text):
                return ChatDelta(content=text)
            case Thought(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallArguments(text):
                call = CallDelta(self._calls - 1, CalledFunctionText(text))
            case CallBegin(name):
                self._calls += 1
                self._templates.pop(CallArguments, None)
                short = self._tokenizer.dialect.form.short_ids
                function = CalledFunctionText("", name)
                call = CallDelta(self._calls - 1, function, new_call_id(short=short), "function")
        return ChatDelta(tool_calls=[call])

    def _one(
        self,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._frame(ChatChunkChoice(self._number, delta, logprobs, finish_reason))


def reason_of(reason: str, *, called: bool) -> str:
    """Return OpenAI's finish reason; a cut-off answer keeps its reason even after a tool call."""
    return TOOL_CALLS if called and reason == FinishReason.STOP.value else reason
