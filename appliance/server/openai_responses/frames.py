"""Writes a response event by event, in OpenAI's order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.dialects import CallBegin
from appliance.errors import ApplianceError
from appliance.server.http.errors import describe
from appliance.server.http.frames import FrameTemplate, event_frame
from appliance.server.openai_responses.answers import (
    BUILT_IN_CALLS,
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    CustomCallItem,
    CustomInputDelta,
    CustomInputDone,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ShellCallItem,
    ShellCommand,
    ShellCommandDelta,
    TextDelta,
    TextDone,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from appliance.dialects import Part
    from appliance.server.openai.answers import TokenLogprob
    from appliance.server.openai_responses.answers import OutputItem
    from appliance.server.openai_responses.responding import Responding
    from appliance.server.requests.answer import Answer

_MARK = FrameTemplate.MARK
_END = b"0}\n\n"  # of a frame that ends in the number 0

logger = logging.getLogger(__name__)


async def response_frames(responding: Responding, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream; a failure after the first frame is a frame too."""
    events = _Events(responding)
    begun = False
    try:
        reason, cuts_call = "", False
        async for pieces in answer.pieces():
            frames = b"" if begun else events.begin()
            begun = True
            for piece in pieces:
                for part, logprobs in responding.with_logprobs(piece.all_parts, piece.tokens):
                    frames += events.part(part, logprobs)
                if piece.finish_reason is not None:
                    reason, cuts_call = piece.finish_reason.value, piece.cuts_call
            yield frames
        yield events.end(answer, reason, cuts_call=cuts_call)
    except Exception as error:
        if not begun:
            raise  # the response has no status yet
        if not isinstance(error, ApplianceError):
            logger.exception("a stream failed")
        yield events.fail(error)


class _Events:
    """Numbers events and makes their frames."""

    def __init__(self, responding: Responding) -> None:
        self._responding = responding
        self._output = responding.output
        self._number = 0
        self._delta: FrameTemplate | None = None  # of the open item

    def begin(self) -> bytes:
        response = self._responding.response
        return b"".join(
            self._frame(ResponseEvent(type=kind, response=response, sequence_number=0))
            for kind in ("response.created", "response.in_progress")
        )

    def part(self, part: Part, logprobs: list[TokenLogprob]) -> bytes:
        frames = b""
        if self._output.begins(part):
            frames = self._done("completed")
            self._output.push(part, logprobs)
            frames += self._added()
        else:
            self._output.push(part, logprobs)
        if isinstance(part, CallBegin) or isinstance(self._output.items[-1], BUILT_IN_CALLS):
            return frames  # the input of a tool that is no function is known at its end
        if logprobs:
            item, index = self._output.items[-1], len(self._output.items) - 1
            delta = TextDelta(
                item_id=item.id, output_index=index, delta=part.text, logprobs=logprobs
            )
            return frames + self._frame(delta)
        return frames + self._more(part.text)

    def end(self, answer: Answer, reason: str, *, cuts_call: bool) -> bytes:
        status = self._responding.status_of(reason)
        frames = self._done(self._responding.status_of(reason, cuts_call=cuts_call))
        response = self._responding.end(answer, reason)
        return frames + self._frame(
            ResponseEvent(type=f"response.{status}", response=response, sequence_number=0)
        )

    def fail(self, error: Exception) -> bytes:
        status, body, _ = describe(error)
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        response = self._responding.response
        response.status = "failed"
        response.error = ResponseFailure(codes.get(status, "server_error"), body.error.message)
        return self._frame(
            ResponseEvent(type="response.failed", response=response, sequence_number=0)
        )

    def _added(self) -> bytes:
        item = self._output.items[-1]
        frames = self._item("response.output_item.added", item)
        self._delta = None
        if isinstance(item, (CallItem, *BUILT_IN_CALLS)):
            return frames
        empty = OutputText() if isinstance(item, MessageItem) else ReasoningText()
        return frames + self._part("response.content_part.added", item, empty)

    def _more(self, text: str) -> bytes:
        """Make a delta's frame; encodes everything but text and number only once."""
        if self._delta is None:
            item, index = self._output.items[-1], len(self._output.items) - 1
            event: Any = TextDelta(item_id=item.id, output_index=index, delta=_MARK)
            if isinstance(item, ReasoningItem):
                event = ReasoningDelta(item_id=item.id, output_index=index, delta=_MARK)
            elif isinstance(item, CallItem):
                event = ArgumentsDelta(item_id=item.id, output_index=index, delta=_MARK)
            frame = event_frame(event.type, event)
            assert frame.endswith(_END)
            self._delta = FrameTemplate(frame.removesuffix(_END))
        frame = self._delta.fill(text) + b"%d}\n\n" % self._number
        self._number += 1
        return frame

    def _done(self, status: str) -> bytes:
        if not self._output.is_open:
            return b""
        self._output.close(status)
        item, index = self._output.items[-1], len(self._output.items) - 1
        frames = b""
        match item:
            case MessageItem(content=[text]):
                done = TextDone(
                    item_id=item.id, output_index=index, text=text.text, logprobs=text.logprobs
                )
                frames = self._frame(done) + self._part("response.content_part.done", item, text)
            case ReasoningItem(content=[thought]):
                said = ReasoningDone(item_id=item.id, output_index=index, text=thought.text)
                frames = self._frame(said)
                frames += self._part("response.content_part.done", item, thought)
            case CustomCallItem():
                delta = CustomInputDelta(item_id=item.id, output_index=index, delta=item.input)
                whole = CustomInputDone(item_id=item.id, output_index=index, input=item.input)
                frames = self._frame(delta) + self._frame(whole)
            case ShellCallItem():
                for number, command in enumerate(item.action.commands):
                    frames += self._command(number, command)
            case CallItem():
                frames = self._frame(
                    ArgumentsDone(
                        item_id=item.id,
                        output_index=index,
                        name=item.name,
                        arguments=item.arguments,
                    )
                )
        return frames + self._item("response.output_item.done", item)

    def _command(self, number: int, command: str) -> bytes:
        """Make the frames of a shell's command, which is known as a whole."""
        index = len(self._output.items) - 1
        return b"".join(
            self._frame(event)
            for event in (
                ShellCommand(
                    type="response.shell_call_command.added",
                    output_index=index,
                    command_index=number,
                    command="",
                ),
                ShellCommandDelta(output_index=index, command_index=number, delta=command),
                ShellCommand(
                    type="response.shell_call_command.done",
                    output_index=index,
                    command_index=number,
                    command=command,
                ),
            )
        )

    def _item(self, kind: str, item: OutputItem) -> bytes:
        index = len(self._output.items) - 1
        return self._frame(ItemEvent(type=kind, output_index=index, item=item, sequence_number=0))

    def _part(self, kind: str, item: OutputItem, part: OutputText | ReasoningText) -> bytes:
        index = len(self._output.items) - 1
        return self._frame(
            PartEvent(type=kind, item_id=item.id, output_index=index, part=part, sequence_number=0)
        )

    def _frame(self, event: Any) -> bytes:
        numbered = msgspec.structs.replace(event, sequence_number=self._number)
        self._number += 1
        return event_frame(event.type, numbered)
