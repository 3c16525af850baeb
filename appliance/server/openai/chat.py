"""POST /v1/chat/completions: begins the answer, and formats its pieces as chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.engine.nouns.request import FinishReason
from appliance.errors import RequestError
from appliance.server.http.frames import FrameTemplate
from appliance.server.openai.answers import (
    AnsweredCall,
    AnsweredCustomCall,
    AssistantMessage,
    CallDelta,
    CalledCustomText,
    CalledFunctionText,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from appliance.server.openai.chunks import Chunks
from appliance.server.openai.logprobs import chat_logprobs, prompt_logprobs
from appliance.server.openai.turns import ending_of, tools_of, turns_of
from appliance.server.requests.conversation import (
    Conversation,
    asked_thinking,
    conversation,
    template_options,
)
from appliance.server.requests.intake import begin_chat
from appliance.server.requests.sampling import limit_of
from appliance.server.requests.tools import input_of, new_call_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from appliance.server.models.model_state import ModelState
    from appliance.server.openai.answers import ChatLogprobs
    from appliance.server.openai.chunks import StreamUsage
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice, Piece
    from appliance.server.requests.schema import ChatRequest
    from appliance.tokenizer import Tokenizer

_MARK = FrameTemplate.MARK


async def answer_chat(
    state: ModelState, body: ChatRequest, owner: str, *, request_id: str, size: int = 0
) -> tuple[Answer, Exchange]:
    """Begin the answer to a chat of `size` bytes; errors are those of `begin_chat`."""
    limits = {
        "max_completion_tokens": body.max_completion_tokens,
        "max_tokens": body.max_tokens,
        "n_predict": body.n_predict,
    }
    if zero := next((name for name, limit in limits.items() if limit == 0), None):
        raise RequestError(f"{zero} must be at least 1, or -1 for as many as fit", param=zero)
    asked = limit_of(*limits.values())
    begins_answer, continues = ending_of(body.add_generation_prompt, body.continue_final_message)
    effort, thought_tokens = asked_thinking(body)

    def make() -> Conversation:
        return Conversation(
            sampling=body,
            turns=partial(turns_of, body.messages),
            tools=tools_of(body),
            max_tokens=asked,
            options=template_options(effort, body.chat_template_kwargs),
            thought_tokens=thought_tokens,
            begins_answer=begins_answer,
            continues=continues,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    chat = await conversation(state, make, owner, size)
    return await begin_chat(state, chat, owner, prefix="chatcmpl-", request_id=request_id)


def chat_frames(
    exchange: Exchange, answer: Answer, *, calls: ChatCalls, usage: StreamUsage
) -> AsyncGenerator[bytes, None]:
    """Yield frames in order: role, parts of the answer, finish reason, usage, [DONE]."""
    chunk = ChatChunk(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=[],
        system_fingerprint=exchange.fingerprint,
    )
    chunks = Chunks(chunk, answer, usage)
    choices: dict[int, ChoiceFrames] = {}  # choices begun

    def frames_of(piece: Piece) -> bytes:
        begin, choice = b"", choices.get(piece.choice)
        if choice is None:
            choice = choices[piece.choice] = ChoiceFrames(
                piece.choice, exchange.tokenizer, chunks.frame, calls, alike=not usage.in_chunks
            )
            begin = choice.begin()
        chunks.count(piece)
        return begin + choice.frames(piece)

    return chunks.frames(frames_of)


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


class ChoiceFrames:
    """Makes frames of one choice's pieces, one for each part.

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


@dataclass(frozen=True, slots=True)
class ChatCalls:
    """The form in which an answer shows calls, which is that of the request's tools.

    Attributes:
        custom: names of custom tools.
        old: an answer has one `function_call`, as OpenAI's of 2023.
    """

    custom: frozenset[str]
    old: bool

    @classmethod
    def of(cls, body: ChatRequest) -> ChatCalls:
        named = (tool.custom.name for tool in body.tools or () if tool.custom is not None)
        return cls(frozenset(named), bool(body.functions))

    def call(self, name: str, arguments: str, call_id: str) -> AnsweredCall | AnsweredCustomCall:
        """Return a call of a whole answer."""
        if name in self.custom:
            return AnsweredCustomCall(call_id, CalledCustomText(input_of(arguments), name))
        return AnsweredCall(call_id, CalledFunctionText(arguments, name))

    def reason(self, reason: str, *, called: bool) -> str:
        """Return OpenAI's finish reason; a cut-off answer keeps its own even after a call."""
        if not called or reason != FinishReason.STOP.value:
            return reason
        return "function_call" if self.old else "tool_calls"
