"""Frames of one choice of a streamed chat, one part each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.server.http.frames import FrameTemplate
from appliance.server.openai.answers import (
    CallDelta,
    CalledCustomText,
    CalledFunctionText,
    ChatChunkChoice,
    ChatDelta,
)
from appliance.server.openai.chat_logprobs import chat_logprobs
from appliance.server.requests.custom_tools import input_of
from appliance.server.requests.tools import new_call_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.server.openai.answers import ChatLogprobs
    from appliance.server.openai.chat_calls import ChatCalls
    from appliance.server.requests.pieces import Piece
    from appliance.tokenizer import Tokenizer

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
        form: ChatCalls,
        *,
        alike: bool,
    ) -> None:
        self._number = number
        self._tokenizer = tokenizer
        self._frame = frame
        self._form = form
        self._alike = alike
        self._calls = 0
        self._input: list[str] | None = None  # pieces of a custom call's arguments, while open
        self._templates: dict[type[Part], FrameTemplate] = {}  # for the last call's arguments

    def begin(self) -> bytes:
        """Return the first frame, which has only the role."""
        return self._one(ChatDelta(role="assistant", content=""))

    def frames(self, piece: Piece) -> bytes:
        """Return the frames of one piece; the choice's last frame has only the finish reason."""
        frames = b""
        parts = piece.all_parts
        if piece.tokens:  # on the first part, if any is final
            first = ChatDelta(content="")
            if parts and not self._keeps(parts[0]):
                frames += self._end_input()
                first = self._delta(parts[0])
            frames += self._one(first, chat_logprobs(piece.tokens, self._tokenizer))
            parts = parts[1:]
        for part in parts:
            if not self._keeps(part):
                frames += self._end_input() + self._part(part)
        if piece.finish_reason is not None:
            frames += self._end_input()
            called = self._calls > 0 and not piece.cuts_call
            reason = self._form.reason(piece.finish_reason.value, called=called)
            frames += self._one(ChatDelta(), None, reason)
        return frames

    def _keeps(self, part: Part) -> bool:
        """Keep arguments of a custom call, whose input is known at its end."""
        if self._input is None or not isinstance(part, CallArguments):
            return False
        self._input.append(part.text)
        return True

    def _end_input(self) -> bytes:
        if self._input is None:
            return b""
        text, self._input = input_of("".join(self._input)), None
        call = CallDelta(self._calls - 1, custom=CalledCustomText(text))
        return self._one(ChatDelta(tool_calls=[call]))

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
                function = CalledFunctionText(text)
                call = CallDelta(self._calls - 1, function)
            case CallBegin(name):
                self._calls += 1
                self._templates.pop(CallArguments, None)
                call_id = new_call_id(short=self._tokenizer.dialect.form.short_ids)
                function = CalledFunctionText("", name)
                call = CallDelta(self._calls - 1, function, call_id, "function")
                if name in self._form.custom:
                    self._input = []
                    custom = CalledCustomText("", name)
                    call = CallDelta(self._calls - 1, id=call_id, type="custom", custom=custom)
        return ChatDelta(function_call=function) if self._form.old else ChatDelta(tool_calls=[call])

    def _one(
        self,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._frame(ChatChunkChoice(self._number, delta, logprobs, finish_reason))
