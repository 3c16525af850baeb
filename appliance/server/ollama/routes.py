"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from appliance.errors import RequestError, UnknownModelError
from appliance.server.http.body import body_size
from appliance.server.http.errors import json_response, request_id_of
from appliance.server.http.openapi import describes
from appliance.server.http.protocols import OLLAMA
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream
from appliance.server.ollama.answers import (
    ChatLine,
    Embedded,
    GenerateLine,
    OllamaMessage,
    OllamaVersion,
    OneEmbedded,
    PullStatus,
    RunningModels,
    Shown,
    Tags,
)
from appliance.server.ollama.lines import (
    NANOSECONDS,
    LineStream,
    chat_line,
    generate_line,
    now,
)
from appliance.server.ollama.models import is_resident, running, shown, tag, thinks
from appliance.server.ollama.schema import (
    HARMLESS,
    HARMLESS_FOR_VECTORS,
    UNSUPPORTED,
    UNSUPPORTED_GENERATE,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    PullRequest,
    ShowRequest,
    unloads,
)
from appliance.server.ollama.turns import sampling_of, tools_of, turns_of, with_images
from appliance.server.requests.answer_size import FLOAT_BYTES
from appliance.server.requests.conversation import Conversation, conversation, template_options
from appliance.server.requests.grammars import checked_grammar, schema_form
from appliance.server.requests.intake import (
    begin_chat,
    once_loaded,
    submit,
    take_body,
    whole_response,
)
from appliance.server.requests.prompt import completion_prompts, fim_prompts
from appliance.server.requests.schema import TermsFields
from appliance.server.requests.tools import Tools
from appliance.server.retrieval.embedding import (
    EmbeddingOptions,
    embed,
    embedding_recipe,
    with_prompt,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Scope

    from appliance.dialects.turns import Turn
    from appliance.grammar import Grammar
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState
    from appliance.server.ollama.lines import LineT
    from appliance.server.ollama.schema import OllamaRequest
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.schema import SamplingFields

# Clients infer features from it, so it is the version of the implemented API.
VERSION = "0.12.0"
# Routes by which Ollama's clients change its models; none is served.
MANAGING = ("/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs/")


def ollama_router(server: ServerState) -> APIRouter:
    router = APIRouter()
    described = partial(describes, protocol=OLLAMA)

    take = partial(take_body, server, find=lambda name: server.find(name or ""))

    @router.post("/api/chat", **described(OllamaChatRequest, ChatLine, streams=True))
    async def chat(request: Request) -> Response:
        state, body = await take(request, OllamaChatRequest, UNSUPPORTED, HARMLESS, streams=True)
        turns = body.messages or []

        async def respond() -> Response:
            if not turns:
                line = ChatLine(model=body.model, created_at=now(), message=OllamaMessage())
                return json_response(_loaded(line, unloads=_unload(state, request, body)))
            owner = key_name(request.scope)

            def make() -> Conversation:
                tools = tools_of(body)
                return _conversation(state, body, partial(turns_of, turns), tools)

            answer, exchange = await begin_chat(
                state,
                await conversation(state, make, owner, body_size(request.scope)),
                owner,
                prefix="chat-",
                request_id=request_id_of(request.scope),
            )
            lines = LineStream(exchange, answer, chat_line, body.model)
            return await _respond(state, request, body, answer, lines)

        streams = body.stream is not False and bool(turns)
        return await once_loaded(state, request, respond, streams=streams)

    @router.post("/api/generate", **described(GenerateRequest, GenerateLine, streams=True))
    async def generate(request: Request) -> Response:
        state, body = await take(
            request, GenerateRequest, UNSUPPORTED_GENERATE, HARMLESS, streams=True
        )
        prompt = body.prompt or ""
        asks = bool(prompt or body.images)

        async def respond() -> Response:
            if not asks:
                line = GenerateLine(model=body.model, created_at=now())
                return json_response(_loaded(line, unloads=_unload(state, request, body)))
            answer, exchange = await _begin_text(state, body, prompt, request.scope)
            lines = LineStream(exchange, answer, generate_line, body.model)
            return await _respond(state, request, body, answer, lines)

        streams = body.stream is not False and asks
        return await once_loaded(state, request, respond, streams=streams)

    @router.post("/api/embed", **described(EmbedRequest, Embedded))
    async def embed(request: Request) -> Response:
        state, body = await take(request, EmbedRequest, {}, HARMLESS_FOR_VECTORS)
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        texts = [text for text in texts if text or len(texts) > 1]
        found = await embedded(state, request, body.model, texts, "input", body.dimensions)
        _unload(state, request, body)
        return json_response(found)

    @router.post("/api/embeddings", **described(EmbeddingsRequest, OneEmbedded))
    async def embeddings(request: Request) -> Response:
        state, body = await take(request, EmbeddingsRequest, {}, HARMLESS_FOR_VECTORS)
        texts = [body.prompt] if body.prompt else []
        found = await embedded(state, request, body.model, texts, "prompt")
        _unload(state, request, body)
        return json_response(OneEmbedded([one for row in found.embeddings for one in row]))

    @router.get("/api/tags", **described(None, Tags))
    async def tags() -> Response:
        if not server.is_up:
            server.default.serving()
        return json_response(Tags([tag(state) for state in server.models]))

    @router.get("/api/ps", **described(None, RunningModels))
    async def processes() -> Response:
        if not server.is_up:
            server.default.serving()
        return json_response(
            RunningModels([running(state) for state in server.models if is_resident(state)])
        )

    @router.post("/api/show", **described(ShowRequest, Shown))
    async def show(request: Request) -> Response:
        state, _ = await take(request, ShowRequest, {}, set())
        return json_response(shown(state))

    @router.post("/api/pull", **described(PullRequest, PullStatus, streams=True))
    async def pull(request: Request) -> Response:
        """Report that a served model is there, as clients ask before they use one."""
        try:
            _, body = await take(request, PullRequest, {}, {"insecure", "username", "password"})
        except UnknownModelError as error:
            raise UnknownModelError(
                f"{error.message}; `appliance models pull` fetches others"
            ) from error
        if body.stream is False:
            return json_response(PullStatus())
        return Response(
            msgspec.json.encode(PullStatus()) + b"\n", media_type=OLLAMA.wire.media_type
        )

    @router.get("/api/version", **described(None, OllamaVersion))
    async def version() -> Response:
        """The emulated version of Ollama, from which clients infer features."""
        return json_response(OllamaVersion(VERSION))

    return router


def _conversation(
    state: ModelState, body: OllamaRequest, turns: Callable[[], list[Turn]], tools: Tools
) -> Conversation:
    if body.think and not thinks(state):
        raise RequestError(f"{body.model[:100]!r} does not support thinking", param="think")
    sampling, max_tokens = _sampling(state, body)
    return Conversation(
        sampling=sampling,
        turns=turns,
        tools=tools,
        max_tokens=max_tokens,
        logprobs=body.reported,
        options=template_options(body.think),
        form=_form(body),
    )


async def _begin_text(
    state: ModelState, body: GenerateRequest, prompt: str, scope: Scope
) -> tuple[Answer, Exchange]:
    """Begin the answer to a prompt, as a chat of one turn or from the raw text."""
    owner, request_id = key_name(scope), request_id_of(scope)
    if not (body.raw or body.suffix):
        chat = _conversation(state, body, partial(_turns, body, prompt), Tools())
        return await begin_chat(
            state,
            replace(chat, param="prompt", size=body_size(scope)),
            owner,
            prefix="generate-",
            request_id=request_id,
        )
    if body.system or body.think or body.images:
        name = "system" if body.system else "think" if body.think else "images"
        without = "suffix" if body.suffix else "raw"
        raise RequestError(f"{name} needs a chat template, which {without} leaves out", param=name)
    form = _form(body)
    sampling, max_tokens = _sampling(state, body)
    if body.suffix:
        if body.raw:
            raise RequestError("raw leaves out what suffix needs; leave one out", param="raw")
        prompts, sampling.stop_token_ids = await fim_prompts(state, prompt, body.suffix, owner)
    else:
        prompts = await completion_prompts(state, prompt, owner)
    return await submit(
        state,
        sampling,
        prompts,
        max_tokens,
        body.reported,
        prefix="generate-",
        param="prompt",
        owner=owner,
        request_id=request_id,
        grammar=None if form is None else await checked_grammar(state, form[1], form[0]),
    )


def _turns(body: GenerateRequest, prompt: str) -> list[Turn]:
    asked: Turn = {"role": "user", "content": with_images(prompt, body.images, "images")}
    return [{"role": "system", "content": body.system}, asked] if body.system else [asked]


def _sampling(state: ModelState, body: OllamaRequest) -> tuple[SamplingFields, int | None]:
    """Return the sampling options and the token limit; None uses the remaining context."""
    options = body.sampling_options
    most = int(options.num_predict or 0)
    sampling = sampling_of(options, stream=body.stream is not False)
    sampling.model = body.model
    return sampling, most if most > 0 else None


def _form(body: OllamaRequest) -> tuple[str, Grammar] | None:
    if not body.format:
        return None
    return schema_form("format", {"type": "object"} if body.format == "json" else body.format)


def _loaded(line: LineT, *, unloads: bool) -> LineT:
    """Build the answer to a request that only loads or unloads the model."""
    line.done, line.done_reason = True, "unload" if unloads else "load"
    return line


def _unload(
    state: ModelState, request: Request, body: OllamaRequest | EmbedRequest | EmbeddingsRequest
) -> bool:
    """Put the model to sleep if the request asks for it, and may decide for everybody."""
    if not unloads(body.keep_alive) or not state.server.may_manage(key_name(request.scope), ""):
        return False
    state.unload()
    return True


async def _respond(
    state: ModelState,
    request: Request,
    body: OllamaRequest,
    answer: Answer,
    lines: LineStream[Any],
) -> Response:
    if body.stream is False:
        try:
            return await whole_response(request, answer, lines.whole)
        finally:
            _unload(state, request, body)

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(lines.stream()) as found:
                async for frame in found:
                    yield frame
        finally:
            _unload(state, request, body)

    return EventStream(frames(), wire=OLLAMA.wire, holds=answer)


async def embedded(
    state: ModelState,
    request: Request,
    model: str,
    texts: list[str],
    param: str,
    dimensions: int | None = None,
) -> Embedded:
    """Embed texts.

    Args:
        model: the name in the request.
        texts: may be empty.
        param: field of the texts.

    Raises:
        RequestError: the request needs something unsupported, or the queue is full.
    """
    begin = time.monotonic()
    recipe = embedding_recipe(state)
    if not texts:
        return Embedded(model=model, embeddings=[])
    wanted = EmbeddingOptions(
        with_prompt([*texts], recipe, None),
        TermsFields(model=model),
        request.scope,
        param=param,
        dimensions=dimensions,
        bytes_per_value=FLOAT_BYTES,
    )
    vectors, num_tokens = await embed(state, request, wanted)

    def build() -> list[list[float]]:
        from appliance.server.retrieval.vectors import floats_of  # slow to import

        return floats_of(vectors())

    embeddings = await asyncio.to_thread(build)
    return Embedded(
        model=model,
        embeddings=embeddings,
        total_duration=round((time.monotonic() - begin) * NANOSECONDS),
        prompt_eval_count=num_tokens,
    )
