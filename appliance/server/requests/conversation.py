"""A chat request in the form to which all protocols are translated, and how it is to think."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.engine.nouns.sampling_params import ThoughtBudget
from appliance.errors import RequestError
from appliance.server.models.text_threads import SHORT
from appliance.server.requests.schema import ReasoningOptions
from appliance.server.requests.tools import Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.dialects.turns import Turn
    from appliance.grammar import Grammar
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import ChatRequest, Effort, SamplingFields
    from appliance.tokenizer import Tokenizer

MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 16 * 1024  # as JSON
# Set by the server itself.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates have three levels


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
        is_limited: its size, which counts kept turns too, has been checked.
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
    is_limited: bool = False
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


def asked_thinking(body: ChatRequest) -> tuple[Effort | bool | None, int | None]:
    """Return the effort of a chat's thoughts, or their switch, and their budget in tokens.

    Of several names of one thing the first that is given counts, from OpenAI's and vLLM's on.
    """
    reasoning, switch = body.reasoning or ReasoningOptions(), body.thinking
    budgets = (
        body.thinking_token_budget,
        reasoning.max_tokens,
        None if switch is None else switch.budget_tokens,
        body.thinking_budget,
    )
    budget = next((tokens for tokens in budgets if tokens is not None), None)
    efforts = (
        body.reasoning_effort,
        reasoning.effort,
        reasoning.enabled,
        None if switch is None else switch.type != "disabled",
        body.think,
        body.enable_thinking,
        # A budget alone does not switch anything, but OpenRouter's does.
        True if reasoning.max_tokens else None,
    )
    return next((effort for effort in efforts if effort is not None), None), budget


def template_options(
    effort: Effort | bool | None, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return variables for the chat template.

    Args:
        effort: `reasoning_effort`, or whether to think at all.
        given: `chat_template_kwargs`, which take precedence.

    Raises:
        RequestError: there are too many, or one has its own field.
    """
    options: dict[str, Any] = {}
    if effort is not None:
        # Templates use either name.
        options["enable_thinking"] = options["thinking"] = effort not in ("none", False)
        if isinstance(effort, str) and effort != "none":
            options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    given = given or {}
    if taken := _RESERVED & given.keys():
        raise RequestError(
            f"chat_template_kwargs has {min(taken)!r}, which is no option of the template; leave "
            "it out",
            param="chat_template_kwargs",
        )
    check_nesting(given, "chat_template_kwargs")
    size = len(json.dumps(given, ensure_ascii=False))
    if len(given) > MAX_OPTIONS or size > MAX_OPTION_CHARACTERS:
        raise RequestError(
            f"chat_template_kwargs has {len(given)} entries and {size} characters; at most "
            f"{MAX_OPTIONS} and {MAX_OPTION_CHARACTERS} are accepted",
            param="chat_template_kwargs",
        )
    return {**options, **given}


def thought_budget(
    most: int | None, tokenizer: Tokenizer, *, thinking: bool
) -> ThoughtBudget | None:
    """Return a thought's budget; None if there is no limit or no thought.

    Args:
        most: tokens of a thought; None for no limit.
        thinking: the answer begins inside a thought.
    """
    marks = tokenizer.dialect.budget_marks
    if most is None or marks is None:
        return None
    ids = tokenizer.mark_ids(marks)

    def tokens(mark: str) -> tuple[int, ...]:
        if mark in ids:
            return (ids[mark],)
        return tuple(tokenizer.encode(mark, add_special_tokens=False))

    opening = () if thinking else tokens(marks.opening)
    budget = most
    if opening:  # the model writes the opening mark, and needs one more token after it
        budget = len(opening) + max(1, budget)
    return ThoughtBudget(budget, opening, tokens(marks.closing))
