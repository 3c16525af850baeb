"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from appliance.errors import RequestError
from appliance.server.anthropic.answers import AnthropicMessage, InputTokens
from appliance.server.anthropic.messages import message_frames, whole_message
from appliance.server.anthropic.schema import (
    HARMLESS,
    UNSUPPORTED,
    CountRequest,
    MessagesRequest,
)
from appliance.server.anthropic.turns import tools_of, turns_of
from appliance.server.http.body import body_size
from appliance.server.http.errors import (
    json_response,
    request_id_of,
)
from appliance.server.http.openapi import describes
from appliance.server.http.protocols import ANTHROPIC, NO_THREADS
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream
from appliance.server.requests.conversation import Conversation, conversation, template_options
from appliance.server.requests.grammars import schema_form
from appliance.server.requests.intake import begin_chat, once_loaded, take_body, whole_response
from appliance.server.requests.prompt import chat_prompt
from appliance.server.requests.schema import SamplingFields

if TYPE_CHECKING:
    from appliance.server.models.state import ServerState


def anthropic_router(server: ServerState) -> APIRouter:
    router = APIRouter()
    described = partial(describes, protocol=ANTHROPIC)

    @router.post(ANTHROPIC.prefix, **described(MessagesRequest, AnthropicMessage, streams=True))
    async def messages(request: Request) -> Response:
        state, body = await take_body(
            server, request, MessagesRequest, UNSUPPORTED, HARMLESS, streams=True
        )
        sampling = SamplingFields(
            model=body.model,
            stream=body.stream,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
        )
        owner = key_name(request.scope)
        make = partial(_conversation, body, sampling, max_tokens=body.max_tokens)
        chat = await conversation(state, make, owner, body_size(request.scope))

        async def respond() -> Response:
            answer, exchange = await begin_chat(
                state,
                chat,
                owner,
                prefix="msg_",
                request_id=request_id_of(request.scope),
            )
            if body.stream:
                frames = message_frames(exchange, answer, max_tokens=body.max_tokens)
                return EventStream(frames, wire=ANTHROPIC.wire, holds=answer)
            build = partial(whole_message, exchange, answer, max_tokens=body.max_tokens)
            return await whole_response(request, answer, build)

        return await once_loaded(state, request, respond, streams=bool(body.stream))

    @router.post(f"{ANTHROPIC.prefix}/count_tokens", **described(CountRequest, InputTokens))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that these messages make."""
        state, body = await take_body(server, request, CountRequest, UNSUPPORTED, HARMLESS)
        owner, make = key_name(request.scope), partial(_conversation, body, SamplingFields())
        chat = await conversation(state, make, owner, body_size(request.scope))
        prompt = await chat_prompt(state, chat, owner)
        return json_response(InputTokens(len(prompt.ids)))

    return router


def _conversation(
    body: CountRequest, sampling: SamplingFields, *, max_tokens: int | None = None
) -> Conversation:
    if body.thread:
        raise RequestError(
            "no conversation is held here; leave thread out, and send all messages",
            param="thread",
            code=NO_THREADS,
        )
    config, thinking = body.output_config, body.thinking
    form = body.output_format if config is None else config.format or body.output_format
    return Conversation(
        sampling=sampling,
        turns=partial(turns_of, body),
        tools=tools_of(body),
        max_tokens=max_tokens,
        options=_options(body),
        thought_tokens=None if thinking is None else thinking.budget_tokens,
        form=None if form is None else schema_form("output_config.format.schema", form.schema),
    )


def _options(body: CountRequest) -> dict[str, Any]:
    """Return template variables; turns thinking off unless requested, if the template can."""
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    options = template_options(effort or ("none" if not thinks else None))
    return options | {"enable_thinking": thinks, "thinking": thinks}
