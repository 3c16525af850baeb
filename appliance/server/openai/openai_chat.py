"""Begins the answer to an OpenAI chat, for the HTTP routes and `own_model`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.errors import RequestError
from appliance.server.openai.turns import ending_of, tools_of, turns_of
from appliance.server.requests.conversation import Conversation, conversation
from appliance.server.requests.intake import begin_chat
from appliance.server.requests.sampling import limit_of
from appliance.server.requests.thinking import asked_thinking, template_options

if TYPE_CHECKING:
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.schema import ChatRequest


async def answer_chat(
    state: ModelState, body: ChatRequest, owner: str, *, request_id: str, size: int = 0
) -> tuple[Answer, Exchange]:
    """Prepare the answer to a chat of `size` bytes; errors are those of `begin_chat`."""
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
