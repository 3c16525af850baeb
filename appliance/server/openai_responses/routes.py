"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from appliance.errors import RequestError
from appliance.server.http.body import body_size
from appliance.server.http.errors import json_response, request_id_of
from appliance.server.http.openapi import describes
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream
from appliance.server.openai_responses.answers import (
    DeletedResponse,
    InputItems,
    ResponseInputTokens,
    ResponseObject,
)
from appliance.server.openai_responses.frames import response_frames
from appliance.server.openai_responses.history import (
    InputReader,
    ResponseStore,
    names_of,
    raw_items_of,
)
from appliance.server.openai_responses.responding import Responding
from appliance.server.openai_responses.schema import HARMLESS, UNSUPPORTED, ResponsesRequest
from appliance.server.openai_responses.turns import tools_of, turns_of
from appliance.server.requests.conversation import Conversation, conversation, template_options
from appliance.server.requests.grammars import schema_form
from appliance.server.requests.intake import begin_chat, once_loaded, take_body, whole_response
from appliance.server.requests.prompt import chat_prompt
from appliance.server.requests.schema import SamplingFields

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams

    from appliance.grammar import Grammar
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState
    from appliance.server.openai_responses.history import ReadInput
    from appliance.server.openai_responses.schema import TextConfig

MAX_METADATA = 16  # entries; 64 characters per name and 512 per value
MAX_LISTED = 100


def responses_router(server: ServerState) -> APIRouter:
    router = APIRouter()
    store = ResponseStore()

    @router.post("/v1/responses", **describes(ResponsesRequest, ResponseObject, streams=True))
    async def responses(request: Request) -> Response:
        state, body = await take_body(
            server, request, ResponsesRequest, UNSUPPORTED, HARMLESS, streams=True
        )
        _check(body)
        owner = key_name(request.scope)
        chat, history = await _chat(server, state, store, body, owner, body_size(request.scope))

        async def respond() -> Response:
            answer, exchange = await begin_chat(
                state, chat, owner, prefix="resp_", request_id=request_id_of(request.scope)
            )
            responding = Responding(state, exchange, body, history, store, owner)
            if body.stream:
                return EventStream(response_frames(responding, answer), holds=answer)
            return await whole_response(request, answer, partial(responding.whole, answer))

        return await once_loaded(state, request, respond, streams=bool(body.stream))

    counted = describes(ResponsesRequest, ResponseInputTokens)

    @router.post("/v1/responses/input_tokens", **counted)
    async def input_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that this input makes."""
        state, body = await take_body(server, request, ResponsesRequest, UNSUPPORTED, HARMLESS)
        owner = key_name(request.scope)
        chat, _ = await _chat(server, state, store, body, owner, body_size(request.scope))
        prompt = await chat_prompt(state, chat, owner)
        return json_response(ResponseInputTokens(input_tokens=len(prompt.ids)))

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        """Compacting is OpenAI's own; say that it is missing, not that its method is wrong."""
        raise HTTPException(404)

    @router.get("/v1/responses/{response_id}", **describes(None, ResponseObject, path=_ID))
    async def response(request: Request) -> Response:
        """Return a stored response; it cannot be streamed again."""
        kept = store.get(key_name(request.scope), request.path_params["response_id"])
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("a kept response is not streamed; leave stream out", param="stream")
        return Response(kept.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", **describes(None, DeletedResponse, path=_ID))
    async def delete(request: Request) -> Response:
        """Delete a response; later ones in its conversation stay complete."""
        response_id = request.path_params["response_id"]
        store.delete(key_name(request.scope), response_id)
        return json_response(DeletedResponse(id=response_id))

    @router.get("/v1/responses/{response_id}/input_items", **describes(None, InputItems, path=_ID))
    async def input_items(request: Request) -> Response:
        """Return the input of a response, without the conversation before it."""
        kept = store.get(key_name(request.scope), request.path_params["response_id"])
        return json_response(_page(kept.own_items(), request.query_params))

    return router


_ID = ("response_id",)


def _check(body: ResponsesRequest) -> None:
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(name) > 64 or len(value) > 512 for name, value in metadata.items()
    ):
        raise RequestError(
            f"metadata has at most {MAX_METADATA} entries of 64 and 512 characters",
            param="metadata",
        )


async def _chat(
    server: ServerState,
    state: ModelState,
    store: ResponseStore,
    body: ResponsesRequest,
    owner: str,
    size: int,
) -> tuple[Conversation, ReadInput]:
    """Make the conversation of a request of `size` bytes, and what it continues."""
    reader = InputReader(store, owner, body, max_bytes=server.config.max_body_bytes)
    size += reader.size
    history = await state.texts.run(reader.read, owner=owner, size=size)
    make = partial(_conversation, body, history)
    return await conversation(state, make, owner, size), history


def _conversation(body: ResponsesRequest, history: ReadInput) -> Conversation:
    return Conversation(
        sampling=SamplingFields(
            model=body.model,
            stream=body.stream,
            temperature=body.temperature,
            top_p=body.top_p,
        ),
        turns=lambda: turns_of(body.instructions, history.before.items(), history.items),
        tools=tools_of(body),
        max_tokens=body.max_output_tokens,
        logprobs=body.logprobs,
        options=template_options(None if body.reasoning is None else body.reasoning.effort),
        form=_form(body.text),
        param="input",
        is_limited=True,
        continues=None if history.is_open else False,
    )


def _form(text: TextConfig | None) -> tuple[str, Grammar] | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return schema_form("text.format", {"type": "object"})
    if form.schema is None:
        raise RequestError("text.format.schema is missing", param="text.format.schema")
    return schema_form("text.format.schema", form.schema)


def _page(own: bytes, asked: QueryParams) -> InputItems:
    """Return a page of items, latest first by default."""
    items = raw_items_of(own)
    names = [item.id for item in names_of(own)]
    limit = asked.get("limit", "20")
    if not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= MAX_LISTED):
        raise RequestError(f"limit must be between 1 and {MAX_LISTED}", param="limit")
    if asked.get("order", "desc") != "asc":
        items.reverse()
        names.reverse()
    begin = 0
    if (after := asked.get("after")) is not None:
        if after not in names:
            raise RequestError(f"after names {after[:80]!r}, which is not there", param="after")
        begin = names.index(after) + 1
    end = begin + int(limit)
    shown = names[begin:end]
    return InputItems(
        data=items[begin:end],
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=end < len(items),
    )
