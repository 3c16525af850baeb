"""Formats an answer as a message of Anthropic's API, whole or as events."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import TYPE_CHECKING, Any

from appliance.dialects import CallArguments, CallBegin, Part, Thought
from appliance.engine.nouns.request import FinishReason
from appliance.server.anthropic.answers import (
    AnswerBlock,
    AnthropicMessage,
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from appliance.server.http.frames import FrameTemplate, event_frame
from appliance.server.requests.tools import arguments_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice, Piece

_MARK = FrameTemplate.MARK


def _frame(event: Any) -> bytes:
    return event_frame(event.__struct_config__.tag, event)


async def message_frames(
    exchange: Exchange, answer: Answer, *, max_tokens: int
) -> AsyncGenerator[bytes, None]:
    """Yield frames: message start, each block from start to stop, stop reason with usage, end."""
    blocks: _BlockFrames | None = None
    last: Piece | None = None
    async for pieces in answer.pieces():
        frames = b""
        if blocks is None:
            blocks = _BlockFrames()
            frames = _frame(MessageStart(_message(exchange, answer, [])))
        for piece in pieces:
            last = piece
            frames += b"".join(map(blocks.frames, piece.all_parts))
        yield frames
    assert blocks is not None
    assert last is not None
    assert last.finish_reason is not None
    reason, stopped_by = last.finish_reason.value, last.stopped_by
    called = blocks.called and not last.cuts_call
    delta = stop_delta(answer, reason, stopped_by, called=called, max_tokens=max_tokens)
    end = MessageDelta(delta, _usage(answer))
    yield blocks.stop() + _frame(end) + _frame(MessageStop())


def whole_message(
    exchange: Exchange, answer: Answer, wholes: Sequence[FinishedChoice], *, max_tokens: int
) -> AnthropicMessage:
    """Build the answer as one object; see `message_frames`."""
    (whole,) = wholes
    message = _message(exchange, answer, answer_blocks(whole.all_parts))
    called = any(isinstance(block, ToolUseBlock) for block in message.content)
    called = called and not whole.cuts_call
    delta = stop_delta(
        answer, whole.finish_reason, whole.stopped_by, called=called, max_tokens=max_tokens
    )
    message.stop_reason, message.stop_sequence = delta.stop_reason, delta.stop_sequence
    return message


def stop_delta(
    answer: Answer, reason: str, stopped_by: str, *, called: bool, max_tokens: int
) -> StopDelta:
    """Return the stop reason; a cut-off answer keeps its reason even after a tool call."""
    if reason == FinishReason.LENGTH.value:
        full = answer.completion_tokens < max_tokens
        return StopDelta("model_context_window_exceeded" if full else "max_tokens", None)
    if reason != FinishReason.STOP.value:
        return StopDelta("max_tokens", None)
    if stopped_by:
        return StopDelta("stop_sequence", stopped_by)
    return StopDelta("tool_use" if called else "end_turn", None)


class _BlockFrames:
    """Makes frames from parts; a run of one kind is one block."""

    def __init__(self) -> None:
        self.called = False
        self._index = -1
        self._kind: type[Part] | None = None  # of the open block
        self._template: FrameTemplate | None = None  # of the block's deltas
        self._thought: list[str] = []  # in the open block

    def frames(self, part: Part) -> bytes:
        if isinstance(part, CallBegin):
            self.called = True
            return self._start(CallArguments, _call(part, {}))
        frames = b""
        if type(part) is not self._kind:
            frames = self._start(
                type(part), ThinkingBlock() if isinstance(part, Thought) else TextBlock()
            )
        if isinstance(part, Thought):
            self._thought.append(part.text)
        if self._template is None:
            self._template = FrameTemplate(_frame(BlockDelta(self._index, _delta(self._kind))))
        return frames + self._template.fill(part.text)

    def stop(self) -> bytes:
        """Return the frame that ends the open block, or nothing."""
        if self._kind is None:
            return b""
        frames = b""
        if self._kind is Thought:
            signature = SignatureDelta(_signature("".join(self._thought)))
            frames = _frame(BlockDelta(self._index, signature))
            self._thought.clear()
        self._kind = None
        return frames + _frame(BlockStop(self._index))

    def _start(self, kind: type[Part], block: AnswerBlock) -> bytes:
        frames = self.stop()
        self._index += 1
        self._kind, self._template = kind, None
        return frames + _frame(BlockStart(self._index, block))


def _delta(kind: type[Part] | None) -> TextDelta | ThinkingDelta | InputDelta:
    if kind is CallArguments:
        return InputDelta(_MARK)
    return ThinkingDelta(_MARK) if kind is Thought else TextDelta(_MARK)


def answer_blocks(parts: Sequence[Part]) -> list[AnswerBlock]:
    """Return the blocks of a whole answer; parts of one kind in a row are one block."""
    blocks: list[AnswerBlock] = []
    kind: type[Part] | None = None
    texts: list[str] = []  # of the last block

    def end_block() -> None:
        text = "".join(texts)
        texts.clear()
        match blocks[-1] if blocks else None:
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as block:
                block.thinking, block.signature = text, _signature(text)
            case ToolUseBlock() as block:
                block.input = arguments_of(text) or {}  # a cut one is none

    for part in parts:
        if isinstance(part, CallBegin):
            end_block()
            blocks.append(_call(part, {}))
            kind = CallArguments
            continue
        if type(part) is not kind:
            end_block()
            blocks.append(ThinkingBlock() if isinstance(part, Thought) else TextBlock())
            kind = type(part)
        texts.append(part.text)
    end_block()
    return blocks


def _call(part: CallBegin, arguments: dict[str, Any]) -> ToolUseBlock:
    return ToolUseBlock(id=f"toolu_{secrets.token_hex(12)}", name=part.name, input=arguments)


def _signature(thought: str) -> str:
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def _message(exchange: Exchange, answer: Answer, content: list[AnswerBlock]) -> AnthropicMessage:
    return AnthropicMessage(
        id=exchange.id,
        model=exchange.model,
        content=content,
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(answer),
    )


def _usage(answer: Answer) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=answer.prompt_tokens - answer.cached_tokens,
        cache_read_input_tokens=answer.cached_tokens,
        output_tokens=answer.completion_tokens,
        output_tokens_details=OutputTokensDetails(answer.reasoning_tokens),
    )
