"""Builds one response from its items, and stores it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.engine.nouns.request import FinishReason
from appliance.server.openai.logprobs import chat_logprobs, tokens_of
from appliance.server.openai_responses.answers import (
    BUILT_IN_CALLS,
    CallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningEffort,
    ReasoningItem,
    ReasoningText,
    ReasoningTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from appliance.server.openai_responses.built_in import call_item, fill
from appliance.server.openai_responses.schema import ENCRYPTED, TextConfig, TextFormat
from appliance.server.openai_responses.turns import carried, full_names, kinds_of
from appliance.server.requests.tools import new_call_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.server.models.model_state import ModelState
    from appliance.server.openai.answers import TokenLogprob
    from appliance.server.openai_responses.answers import Status
    from appliance.server.openai_responses.history import ReadInput, ResponseStore
    from appliance.server.openai_responses.schema import ResponsesRequest
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice

_KINDS: dict[type[Part], tuple[type[OutputItem], ...]] = {
    Content: (MessageItem,),
    Thought: (ReasoningItem,),
    CallArguments: (CallItem, *BUILT_IN_CALLS),
}
_encode = msgspec.json.encode


class Responding:
    """Builds a response from an answer.

    Args:
        history: the conversation so far.
        store: keeps the response if the client requests it; otherwise None.
    """

    def __init__(
        self,
        state: ModelState,
        exchange: Exchange,
        body: ResponsesRequest,
        history: ReadInput,
        store: ResponseStore,
        owner: str,
    ) -> None:
        short_ids = exchange.tokenizer.dialect.form.short_ids
        self.output = OutputItems(
            full_names(body.tools),
            kinds_of(body.tools),
            short_ids=short_ids,
            carries=ENCRYPTED in (body.include or ()),
        )
        self.response = _response(state, exchange, body)
        self._tokenizer = exchange.tokenizer
        self._history = history
        self._store = store
        self._owner = owner

    def whole(self, answer: Answer, wholes: Sequence[FinishedChoice]) -> ResponseObject:
        (whole,) = wholes
        for parts, tokens in whole.reported or [(whole.all_parts, ())]:
            for part, logprobs in self.with_logprobs(parts, tokens):
                self.output.push(part, logprobs)
        self.output.close(self.status_of(whole.finish_reason, cuts_call=whole.cuts_call))
        return self.end(answer, whole.finish_reason)

    def with_logprobs(
        self, parts: Sequence[Part], tokens: Sequence[TokenLogprobs]
    ) -> Iterator[tuple[Part, list[TokenLogprob]]]:
        """Yield each part of a piece; a message's first part gets the tokens' log probabilities."""
        for part in parts:
            logprobs: list[TokenLogprob] = []
            if tokens and isinstance(part, Content):
                own = tokens_of(part.text, tokens, self._tokenizer)
                logprobs, tokens = chat_logprobs(own, self._tokenizer).content, ()
            yield part, logprobs

    def status_of(self, reason: str, *, cuts_call: bool = False) -> Status:
        """Return the status of a response that ends so; with `cuts_call`, of its last item."""
        is_whole = reason == FinishReason.STOP.value and not cuts_call
        return "completed" if is_whole else "incomplete"

    def end(self, answer: Answer, reason: str) -> ResponseObject:
        response = self.response
        response.status = self.status_of(reason)
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.output = self.output.items
        response.usage = ResponseUsage(
            answer.prompt_tokens,
            InputTokensDetails(answer.cached_tokens),
            answer.completion_tokens,
            ReasoningTokensDetails(answer.reasoning_tokens),
            answer.prompt_tokens + answer.completion_tokens,
        )
        if response.store:
            self._keep(response)
        return response

    def _keep(self, response: ResponseObject) -> None:
        names = [item.id for item in response.output]
        kept = self._history.kept_with(_encode(response), _encode(response.output), names)
        self._store.keep(self._owner, response.id, kept)


def _response(state: ModelState, exchange: Exchange, body: ResponsesRequest) -> ResponseObject:
    reasoning, values = body.reasoning, state.sampling.values
    text = body.text or TextConfig()
    return ResponseObject(
        id=exchange.id,
        created_at=exchange.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=exchange.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningEffort(
            None if reasoning is None else reasoning.effort,
            None if reasoning is None else reasoning.summary,
        ),
        store=body.store is not False,
        temperature=values.get("temperature", 1.0)
        if body.temperature is None
        else body.temperature,
        text=msgspec.structs.replace(text, format=text.format or TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=values.get("top_p", 1.0) if body.top_p is None else body.top_p,
        metadata=body.metadata or {},
    )


class OutputItems:
    """Makes items from parts; a run of one kind is one item.

    Args:
        names: namespace and name of each tool in one, by the model's name for it.
        kinds: kind of each tool that is no function, by that name; see `built_in`.
        short_ids: use the short call ids that some templates require.
        carries: add `encrypted_content` to thoughts.
    """

    def __init__(
        self,
        names: Mapping[str, tuple[str, str]],
        kinds: Mapping[str, str],
        *,
        short_ids: bool,
        carries: bool,
    ) -> None:
        self._logprobs: list[TokenLogprob] = []  # of the open item
        self.items: list[OutputItem] = []  # the last one may be open
        self.is_open = False
        self._names = names
        self._kinds = kinds
        self._short_ids = short_ids
        self._carries = carries
        self._texts: list[str] = []  # of the open item

    def begins(self, part: Part) -> bool:
        if isinstance(part, CallBegin) or not self.is_open:
            return True
        return not isinstance(self.items[-1], _KINDS[type(part)])

    def push(self, part: Part, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add a part with its tokens' log probabilities, closing the item that it ends."""
        if self.begins(part):
            self.close("completed")
            self.items.append(self._item(part))
            self.is_open = True
        if not isinstance(part, CallBegin):
            self._texts.append(part.text)
        self._logprobs += logprobs

    def close(self, status: str) -> None:
        """End the open item.

        Args:
            status: completed, or incomplete if the answer was cut off in it.
        """
        if not self.is_open:
            return
        self.is_open = False
        text = "".join(self._texts)
        self._texts.clear()
        logprobs, self._logprobs = self._logprobs, []
        item = self.items[-1]
        item.status = "completed" if status == "completed" else "incomplete"
        match item:
            case MessageItem():
                item.content = [OutputText(text=text, logprobs=logprobs)]
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                if self._carries:
                    item.encrypted_content = carried(text)
            case CallItem():
                item.arguments = text
            case _:
                fill(item, text, item.status)

    def _item(self, part: Part) -> OutputItem:
        number = secrets.token_hex(12)
        if isinstance(part, CallBegin):
            call_id = new_call_id(short=self._short_ids)
            if part.name in self._kinds:
                return call_item(self._kinds[part.name], part.name, number, call_id)
            call = CallItem(id=f"fc_{number}", call_id=call_id, name=part.name)
            if part.name in self._names:
                call.namespace, call.name = self._names[part.name]
            return call
        if isinstance(part, Thought):
            return ReasoningItem(id=f"rs_{number}", content=[])
        return MessageItem(id=f"msg_{number}", content=[])
