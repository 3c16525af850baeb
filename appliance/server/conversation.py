"""A chat request in the form that all protocols are translated to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.server.tools import Tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.dialects.turns import Turn
    from appliance.grammar import Grammar
    from appliance.server.schema import SamplingFields


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat.

    Attributes:
        sampling: how tokens are chosen, what the answer looks like, and the terms.
        turns: makes the messages as templates expect them; called in a thread, since it can take
            long, and raises RequestError for what is not supported.
        tools: that are offered.
        max_tokens: of the answer; None for as many as fit.
        options: variables for the chat template.
        thought_tokens: after which a thought is ended; None for never.
        logprobs: alternatives to report for each token; None reports nothing.
        form: grammar of the answer, behind the name of the field that asks for it; None leaves it
            to `sampling`.
        param: field of the body that holds the messages.
        begins_answer: the prompt ends where an answer begins.
    """

    sampling: SamplingFields
    turns: Callable[[], list[Turn]]
    tools: Tools = field(default_factory=Tools)
    max_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    thought_tokens: int | None = None
    logprobs: int | None = None
    form: tuple[str, Grammar] | None = None
    param: str = "messages"
    begins_answer: bool = True
