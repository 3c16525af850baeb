"""A chat request in the form to which all protocols are translated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.server.models.text_threads import SHORT
from appliance.server.requests.tools import Tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.dialects.turns import Turn
    from appliance.grammar import Grammar
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import SamplingFields


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
        size: bytes of the request, for its place among others in `TextThreads`.
        begins_answer: the prompt ends with the opening of an answer.
        continues: the answer continues the last turn, which is the assistant's; None if it has
            text and no calls.
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
    size: int = 0
    begins_answer: bool = True
    continues: bool | None = None


async def conversation(
    state: ModelState, make: Callable[[], Conversation], owner: str, size: int
) -> Conversation:
    """Make the conversation of a request, in a thread if its body is long.

    Args:
        make: checks tools and the answer's format; raises RequestError.
        owner: name of the request's API key.
        size: bytes of the body.
    """
    chat = make() if size <= SHORT else await state.texts.run(make, owner=owner, size=size)
    return replace(chat, size=size)
