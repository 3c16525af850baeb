"""Begins the answer to a checked body: queue, prompt, grammar, lengths, engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from appliance.server.http.body import note_ignored, read_json
from appliance.server.http.client_gone import unless_disconnected
from appliance.server.http.errors import json_response
from appliance.server.http.protocols import protocol_of
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream
from appliance.server.requests import unsupported
from appliance.server.requests.answer import Answer
from appliance.server.requests.answer_size import (
    OFF_LOOP_LOGPROBS,
    check_answer,
    check_scores,
    most_tokens,
)
from appliance.server.requests.exchange import Exchange
from appliance.server.requests.grammars import chat_grammar
from appliance.server.requests.prompt import chat_prompt
from appliance.server.requests.sampling import (
    NO_LIMIT,
    completion_budget,
    prepare_beams,
    sampling_params,
)
from appliance.server.requests.terms import Terms

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence

    import msgspec
    from fastapi import Request, Response

    from appliance.engine.nouns.picture import PromptPictures
    from appliance.engine.nouns.sampling_params import ThoughtBudget
    from appliance.grammar import Grammar
    from appliance.server.http.body import StructT
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState
    from appliance.server.requests.conversation import Conversation
    from appliance.server.requests.pieces import FinishedChoice, Reading
    from appliance.server.requests.schema import SamplingFields


async def take_body(
    server: ServerState,
    request: Request,
    kind: type[StructT],
    table: unsupported.Table,
    harmless: set[str],
    *,
    find: Callable[[str | None], ModelState] | None = None,
    streams: bool = False,
) -> tuple[ModelState, StructT]:
    """Read a request's body if the queue has room, and find its model.

    Args:
        table: unsupported fields; see `unsupported`.
        harmless: fields without effect.
        find: returns a model by name; `ServerState.find` by default.
        streams: the answer may stream; then `once_loaded` loads the model.

    Raises:
        RequestError: the queue is full, the body is invalid, or the model is unknown.
        EngineUnavailableError: no model is loaded, or this one fails to load.
    """
    owner = key_name(request.scope)
    server.check_room(owner)
    body, fields = await read_json(request, kind, max_bytes=server.max_body_bytes)
    unsupported.refuse_unsupported(fields, table)
    note_ignored(fields, {*body.__struct_fields__, *table, *harmless})
    name = getattr(body, "model", None) or getattr(body, "name", None)
    model = (find or server.find)(name)
    if not streams:
        await unless_disconnected(request.receive, model.loaded())
    if model.is_loaded and len(server.models) > 1:
        model.serving()
        model.queue.check(owner)
    return model, body


async def once_loaded(
    model: ModelState,
    request: Request,
    respond: Callable[[], Coroutine[Any, Any, Response]],
    *,
    streams: bool,
) -> Response:
    """Load a request's model, then respond.

    Args:
        streams: the answer streams, with keep-alive comments while the model loads.

    Raises:
        EngineUnavailableError: the model fails to load.
    """
    if model.is_loaded or not streams:
        if not model.is_loaded:
            await unless_disconnected(request.receive, model.loaded())
        return await unless_disconnected(request.receive, respond())
    return EventStream(_late_frames(model, respond), wire=protocol_of(request.scope).wire)


async def _late_frames(
    model: ModelState, respond: Callable[[], Awaitable[Response]]
) -> AsyncGenerator[bytes, None]:
    await model.loaded()
    response = await respond()
    assert isinstance(response, EventStream)
    async with aclosing(response.handed_over()) as frames:
        async for frame in frames:
            yield frame


async def begin_chat(
    state: ModelState, chat: Conversation, owner: str, *, prefix: str, request_id: str
) -> tuple[Answer, Exchange]:
    """Prepare the answer to a chat, which is submitted once it is entered.

    Args:
        owner: name of the request's API key.
        prefix: beginning of the answer's id.

    Raises:
        RequestError: the chat needs something unsupported.
        ChatTemplateError: there is no template, or it does not render these messages.
        EngineUnavailableError: no model is loaded.
    """
    prompt = await chat_prompt(state, chat, owner)
    grammar = await chat_grammar(
        state, chat, owner, thinking=prompt.thinking, continues=prompt.continues
    )
    return await submit(
        state,
        chat.sampling,
        [prompt.ids],
        chat.max_tokens,
        chat.logprobs,
        prefix=prefix,
        param=chat.param,
        owner=owner,
        request_id=request_id,
        reading=prompt.reading,
        grammar=grammar,
        budget=prompt.budget,
        pictures=prompt.pictures,
    )


async def submit(
    state: ModelState,
    body: SamplingFields,
    prompts: Sequence[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    prefix: str,
    param: str,
    owner: str,
    request_id: str,
    default: int | None = None,
    reading: Reading | None = None,
    grammar: Grammar | None = None,
    budget: ThoughtBudget | None = None,
    pictures: PromptPictures | None = None,
) -> tuple[Answer, Exchange]:
    """Check lengths and prepare one request per prompt.

    Args:
        max_tokens: limit of each answer; None for `default`, `NO_LIMIT` for the remaining context.
    """
    info, _ = state.serving()
    if max_tokens == NO_LIMIT:
        max_tokens = default = None
    terms = Terms.of(body, state, owner)
    exchange = Exchange.begin(state, prefix, terms.adapter, logprobs=logprobs is not None)
    choices = max(body.n or 1, body.best_of or 1)
    if not body.stream:
        most = most_tokens(len(prompts), choices, logprobs)
        default = most if default is None else min(default, most)
    requests = [
        terms.request(
            f"{exchange.id}-{number}" if len(prompts) > 1 else exchange.id,
            prompt,
            sampling_params(
                body,
                info,
                state.sampling,
                max_tokens=completion_budget(
                    len(prompt),
                    max_tokens,
                    info,
                    param=param,
                    default=default,
                    picture_rows=0 if pictures is None else pictures.num_rows,
                ),
                logprobs=logprobs,
                grammar=grammar,
                budget=budget,
            ),
            pictures=pictures,
        )
        for number, prompt in enumerate(prompts)
    ]
    if not body.stream:
        tokens = max(request.sampling.max_tokens or 1 for request in requests)
        check_answer(len(prompts), choices, tokens, logprobs, param="max_tokens")
    if (scored := body.prompt_logprobs) is not None:
        check_scores(len(prompts), body.n or 1, max(map(len, prompts)), scored)
    requests = await prepare_beams(state, requests)
    return Answer(state, requests, reading, request_id=request_id), exchange


async def whole_response(
    request: Request, answer: Answer, build: Callable[[list[FinishedChoice]], msgspec.Struct]
) -> Response:
    """Build an unstreamed response, unless the client disconnects."""
    with answer:
        wholes = await unless_disconnected(request.receive, answer.whole())
        reports = [*(whole.tokens for whole in wholes), *answer.prompt_logprobs]
        logprobs = sum(1 + len(token.top) for tokens in reports for token in tokens)
        if logprobs > OFF_LOOP_LOGPROBS:
            return await asyncio.to_thread(lambda: json_response(build(wholes)))
        return json_response(build(wholes))
