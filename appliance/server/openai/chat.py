"""POST /v1/chat/completions: formats an answer's pieces as chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.dialects import CallArguments, CallBegin, Content, Thought
from appliance.server.http.frames import DONE, data_frame
from appliance.server.openai.answers import (
    AssistantMessage,
    CalledFunctionText,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
)
from appliance.server.openai.chat_frames import ChoiceFrames
from appliance.server.openai.chat_logprobs import chat_logprobs
from appliance.server.openai.prompt_logprobs import prompt_logprobs
from appliance.server.requests.tools import new_call_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.server.openai.chat_calls import ChatCalls
    from appliance.server.openai.stream_usage import StreamUsage
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice, Piece


async def chat_frames(
    exchange: Exchange, answer: Answer, *, calls: ChatCalls, usage: StreamUsage
) -> AsyncGenerator[bytes, None]:
    """Yield frames in order: role, parts of the answer, finish reason, usage, [DONE]."""
    head = ChatChunk(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=[],
        system_fingerprint=exchange.fingerprint,
    )
    if usage.at_end:
        head.usage = answer.usage_at(0) if usage.in_chunks else None

    def frame(choice: ChatChunkChoice) -> bytes:
        head.choices = [choice]
        return data_frame(head)

    choices: dict[int, ChoiceFrames] = {}  # choices begun

    def frames_of(piece: Piece) -> bytes:
        begin, choice = b"", choices.get(piece.choice)
        if choice is None:
            choice = choices[piece.choice] = ChoiceFrames(
                piece.choice, exchange.tokenizer, frame, calls, alike=not usage.in_chunks
            )
            begin = choice.begin()
        if usage.in_chunks:
            head.usage = answer.usage_at(piece.completion_tokens)
        return begin + choice.frames(piece)

    async for pieces in answer.pieces():
        yield b"".join(map(frames_of, pieces))
    if usage.at_end:
        head.choices = []
        head.usage = answer.usage()
        yield data_frame(head)
    yield DONE


def whole_chat(
    exchange: Exchange, answer: Answer, wholes: Sequence[FinishedChoice], *, calls: ChatCalls
) -> ChatCompletion:
    """Build the answer as one object from ended choices."""
    choices = []
    for number, whole in enumerate(wholes):
        message = _message(exchange, whole, calls)
        called = bool(message.tool_calls or message.function_call) and not whole.cuts_call
        choices.append(
            ChatChoice(
                index=number,
                message=message,
                logprobs=chat_logprobs(whole.tokens, exchange.tokenizer)
                if exchange.logprobs
                else None,
                finish_reason=calls.reason(whole.finish_reason, called=called),
                cumulative_logprob=whole.cumulative_logprob,
            )
        )
    return ChatCompletion(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=choices,
        usage=answer.usage(),
        system_fingerprint=exchange.fingerprint,
        prompt_logprobs=prompt_logprobs(answer, 0, exchange.tokenizer),
    )


def _message(exchange: Exchange, whole: FinishedChoice, form: ChatCalls) -> AssistantMessage:
    if not whole.parts:
        return AssistantMessage(whole.text)
    contents = [part.text for part in whole.parts if isinstance(part, Content)]
    thoughts = [part.text for part in whole.parts if isinstance(part, Thought)]
    message = AssistantMessage("".join(contents) if contents else None)
    if thoughts:
        message.reasoning_content = message.reasoning = "".join(thoughts)
    short = exchange.tokenizer.dialect.form.short_ids
    calls = _calls(whole)
    if calls and form.old:
        ((name, arguments),) = calls
        message.function_call = CalledFunctionText(arguments, name)
    elif calls:
        message.tool_calls = [
            form.call(name, arguments, new_call_id(short=short)) for name, arguments in calls
        ]
    return message


def _calls(whole: FinishedChoice) -> list[tuple[str, str]]:
    """Return names and arguments."""
    calls: list[tuple[str, list[str]]] = []
    for part in whole.parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.text)
    return [(name, "".join(pieces)) for name, pieces in calls]
