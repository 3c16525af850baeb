"""The form in which a chat's answer shows calls, which is that of the request's tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import FinishReason
from appliance.server.openai.answers import (
    AnsweredCall,
    AnsweredCustomCall,
    CalledCustomText,
    CalledFunctionText,
)
from appliance.server.requests.custom_tools import input_of

if TYPE_CHECKING:
    from appliance.server.requests.schema import ChatRequest


@dataclass(frozen=True, slots=True)
class ChatCalls:
    """The form of calls.

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
