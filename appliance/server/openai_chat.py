"""Begins the answer to an OpenAI chat, for the HTTP routes and `own_model`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.server.conversation import Conversation
from appliance.server.intake import begin_chat
from appliance.server.thinking import template_options
from appliance.server.turns import tools_of, turns_of

if TYPE_CHECKING:
    from appliance.server.answer import Answer
    from appliance.server.exchange import Exchange
    from appliance.server.model_state import ModelState
    from appliance.server.schema import ChatRequest


async def answer_chat(
    state: ModelState, body: ChatRequest, owner: str, *, request_id: str
) -> tuple[Answer, Exchange]:
    """Submit a chat; arguments and errors are those of `begin_chat`."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    chat = Conversation(
        sampling=body,
        turns=partial(turns_of, body.messages),
        tools=tools_of(body),
        max_tokens=asked,
        options=template_options(body.reasoning_effort, body.chat_template_kwargs),
        thought_tokens=body.thinking_token_budget,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return await begin_chat(state, chat, owner, prefix="chatcmpl-", request_id=request_id)
