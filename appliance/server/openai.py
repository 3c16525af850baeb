"""The routes of the OpenAI API: chat completions, text completions, models."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from appliance.errors import RequestError
from appliance.server import unsupported
from appliance.server.answer import Answer
from appliance.server.answer_size import OFF_LOOP_LOGPROBS, check_answer, most_tokens
from appliance.server.beams import prepare_beams
from appliance.server.body import note_ignored, read_json
from appliance.server.chat import chat_frames, whole_chat
from appliance.server.chat_grammars import chat_grammar
from appliance.server.completions import completion_frames, whole_completion
from appliance.server.door import key_name
from appliance.server.errors import json_response
from appliance.server.exchange import Exchange
from appliance.server.grammars import prepare_grammar
from appliance.server.openapi import describes
from appliance.server.prompt import chat_prompt, completion_prompts, prompt_text
from appliance.server.responses import ChatCompletion, Completion, ModelCard, ModelList
from appliance.server.sampling import completion_budget, sampling_params
from appliance.server.schema import ChatRequest, CompletionRequest
from appliance.server.scoring import Scoring
from appliance.server.stream import EventStream, unless_disconnected
from appliance.server.terms import Terms, salt_of
from appliance.server.tools import Tools

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from appliance.engine.request import ThoughtBudget
    from appliance.grammar import Grammar
    from appliance.server.answer import Reading, Whole
    from appliance.server.schema import SamplingFields
    from appliance.server.state import ServerState

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it


def openai_router(state: ServerState) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter()

    @router.post("/v1/chat/completions", **describes(ChatRequest, ChatCompletion, streams=True))
    async def chat_completions(request: Request) -> Response:
        state.serving()
        state.queue.check(key_name(request.scope))
        body, fields = await read_json(request, ChatRequest, max_bytes=state.config.max_body_bytes)
        _check_fields(state, body, fields, unsupported.CHAT)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        salt = salt_of(state, body, key_name(request.scope))
        tools = Tools.of(body)
        prompt = await chat_prompt(state, body, tools, salt)
        grammar = await chat_grammar(state, body, tools, thinking=prompt.thinking)
        asked = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        answer, exchange = await _submit(
            state,
            body,
            [prompt.ids],
            asked,
            logprobs,
            prefix="chatcmpl",
            param="messages",
            owner=key_name(request.scope),
            reading=prompt.reading,
            grammar=grammar,
            budget=prompt.budget,
        )
        if body.stream:
            frames = chat_frames(exchange, answer, include_usage=_include_usage(body))
            return EventStream(frames, on_close=answer.close)
        return await _whole(request, answer, partial(whole_chat, exchange, answer))

    @router.post("/v1/completions", **describes(CompletionRequest, Completion, streams=True))
    async def completions(request: Request) -> Response:
        state.serving()
        state.queue.check(key_name(request.scope))
        body, fields = await read_json(
            request, CompletionRequest, max_bytes=state.config.max_body_bytes
        )
        _check_fields(state, body, fields, unsupported.COMPLETION)
        prompts = await completion_prompts(state, body.prompt)
        if body.echo and body.logprobs is not None:
            scoring = Scoring.begin(state, body, prompts, owner=key_name(request.scope))
            return await _whole(request, scoring.answer, scoring.completion)
        texts = [""] * len(prompts)
        if body.echo:
            texts = prompt_text(body.prompt, state.serving()[1])
        echo = [text for text in texts for _ in range(body.n or 1)]
        grammar = await prepare_grammar(state, body)
        answer, exchange = await _submit(
            state,
            body,
            prompts,
            body.max_tokens,
            body.logprobs,
            prefix="cmpl",
            param="prompt",
            owner=key_name(request.scope),
            default=DEFAULT_COMPLETION_TOKENS,
            grammar=grammar,
        )
        if body.stream:
            frames = completion_frames(
                exchange, answer, include_usage=_include_usage(body), echo=echo
            )
            return EventStream(frames, on_close=answer.close)
        return await _whole(request, answer, partial(whole_completion, exchange, answer, echo=echo))

    def card() -> ModelCard:
        info, _ = state.serving()
        return ModelCard(
            id=state.model_id,
            created=int(state.started),
            max_model_len=info.context_length,
            default_parameters=dict(state.sampling.values),
        )

    @router.get("/v1/models", **describes(None, ModelList))
    async def models() -> Response:
        return json_response(ModelList(data=[card()]))

    @router.get("/v1/models/{model_id:path}", **describes(None, ModelCard, path=("model_id",)))
    async def model(request: Request) -> Response:
        state.check_model(request.path_params["model_id"])
        return json_response(card())

    return router


def _check_fields(
    state: ServerState,
    body: SamplingFields,
    fields: dict[str, Any],
    table: dict[str, tuple[Any, ...]],
) -> None:
    unsupported.refuse_unsupported(fields, table)
    note_ignored(fields, {*body.__struct_fields__, *table, *unsupported.HARMLESS})
    state.check_model(body.model)


async def _submit(
    state: ServerState,
    body: SamplingFields,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    prefix: str,
    param: str,
    owner: str,
    default: int | None = None,
    reading: Reading | None = None,
    grammar: Grammar | None = None,
    budget: ThoughtBudget | None = None,
) -> tuple[Answer, Exchange]:
    """Check lengths and queue, then hand one request per prompt to the engine."""
    info, _ = state.serving()
    exchange = Exchange.begin(state, prefix, logprobs=logprobs is not None)
    terms = Terms.of(body, state, owner)
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
                    len(prompt), max_tokens, info, param=param, default=default
                ),
                logprobs=logprobs,
                grammar=grammar,
                budget=budget,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    if not body.stream:
        tokens = max(request.sampling.max_tokens or 1 for request in requests)
        check_answer(len(prompts), choices, tokens, logprobs, param="max_tokens")
    requests = await prepare_beams(state, requests)
    tokens = sum(len(one.prompt_token_ids) for one in requests)
    state.queue.check(owner, len(requests), tokens)
    return Answer(state, requests, reading), exchange


async def _whole(
    request: Request, answer: Answer, build: Callable[[list[Whole]], msgspec.Struct]
) -> Response:
    try:
        wholes = await unless_disconnected(request.receive, answer.whole())
        logprobs = sum(1 + len(token.top) for whole in wholes for token in whole.tokens)
        if logprobs > OFF_LOOP_LOGPROBS:
            return await asyncio.to_thread(lambda: json_response(build(wholes)))
        return json_response(build(wholes))
    finally:
        answer.close()


def _include_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
