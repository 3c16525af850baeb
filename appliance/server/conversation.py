"""A chat request in the form to which all protocols are translated."""

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
        turns: builds the messages for the template; slow, so call it in a thread; raises
            RequestError for unsupported parts.
        max_tokens: limit of the answer; None uses the remaining context.
        thought_tokens: limit of a thought; None for no limit.
        logprobs: alternatives per token; None reports nothing.
        form: the requesting field's name and the answer's grammar; None leaves it to `sampling`.
        param: field of the body that holds the messages.
        begins_answer: the prompt ends with the opening of an answer.
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
