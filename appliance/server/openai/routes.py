"""The routes of the OpenAI API: chats, text completions, models; and llama-server's /props."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.supervisor import EngineState
from appliance.errors import RequestError
from appliance.server.http.body import body_size
from appliance.server.http.errors import json_response, request_id_of
from appliance.server.http.openapi import describes
from appliance.server.http.request_middleware import key_name
from appliance.server.http.stream import EventStream
from appliance.server.openai.answers import (
    ChatCompletion,
    Completion,
    GenerationParams,
    GenerationSettings,
    Modalities,
    ModelCard,
    ModelList,
    Props,
    PropsModalities,
)
from appliance.server.openai.chat import ChatCalls, answer_chat, chat_frames, whole_chat
from appliance.server.openai.chunks import StreamUsage
from appliance.server.openai.completions import EchoScoring, completion_frames, whole_completion
from appliance.server.requests import unsupported
from appliance.server.requests.grammars import prepare_grammar
from appliance.server.requests.intake import once_loaded, submit, take_body, whole_response
from appliance.server.requests.prompt import completion_prompts, fim_prompts, prompt_text
from appliance.server.requests.sampling import limit_of
from appliance.server.requests.schema import ChatRequest, CompletionRequest
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it


def openai_router(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **describes(ChatRequest, ChatCompletion, streams=True))
    async def chat_completions(request: Request) -> Response:
        harmless = unsupported.HARMLESS
        state, body = await take_body(
            server, request, ChatRequest, unsupported.CHAT, harmless, streams=True
        )
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")

        async def respond() -> Response:
            owner, request_id = key_name(request.scope), request_id_of(request.scope)
            calls = ChatCalls.of(body)
            answer, exchange = await answer_chat(
                state, body, owner, request_id=request_id, size=body_size(request.scope)
            )
            if body.stream:
                usage = StreamUsage.of(body, state.config)
                frames = chat_frames(exchange, answer, calls=calls, usage=usage)
                return EventStream(frames, holds=answer)
            whole = partial(whole_chat, exchange, answer, calls=calls)
            return await whole_response(request, answer, whole)

        return await once_loaded(state, request, respond, streams=bool(body.stream))

    @router.post("/v1/completions", **describes(CompletionRequest, Completion, streams=True))
    async def completions(request: Request) -> Response:
        state, body = await take_body(
            server,
            request,
            CompletionRequest,
            unsupported.COMPLETION,
            unsupported.HARMLESS,
            streams=True,
        )
        respond = partial(_complete, state, request, body)
        return await once_loaded(state, request, respond, streams=bool(body.stream))

    @router.get("/v1/models", **describes(None, ModelList))
    async def models() -> Response:
        if not server.is_up:
            server.default.serving()
        cards = [
            model_card(state, adapter)
            for state in server.models
            for adapter in (None, *state.adapters.names())
        ]
        ends = (cards[0].id, cards[-1].id) if cards else (None, None)
        return json_response(ModelList(data=cards, first_id=ends[0], last_id=ends[1]))

    @router.get("/v1/models/{model_id:path}", **describes(None, ModelCard, path=("model_id",)))
    async def model(request: Request) -> Response:
        name = request.path_params["model_id"]
        state = server.find(name)
        if not server.is_up:
            state.serving()
        adapter = state.adapters.find(name)
        return json_response(model_card(state, None if adapter is None else adapter.name))

    @router.get("/props", **describes(None, Props, query=("model",)))
    async def props(request: Request) -> Response:
        """Describe a loaded model, or one asleep, as llama-server does."""
        return json_response(_props(server.find(request.query_params.get("model"))))

    return router


async def _complete(state: ModelState, request: Request, body: CompletionRequest) -> Response:
    owner = key_name(request.scope)
    if body.suffix:
        prompts, ends = await fim_prompts(state, body.prompt, body.suffix, owner)
        body.stop_token_ids = [*(body.stop_token_ids or ()), *ends]
    else:
        prompts = await completion_prompts(state, body.prompt, owner)
    nothing_more = body.max_tokens == 0 and body.prompt_logprobs is None
    if body.echo and (body.logprobs is not None or nothing_more):
        scoring = EchoScoring.begin(
            state,
            body,
            prompts,
            owner=owner,
            request_id=request_id_of(request.scope),
        )
        return await whole_response(request, scoring.answer, scoring.completion)
    texts = [""] * len(prompts)
    if body.echo:
        texts = prompt_text(body.prompt, state.serving()[1])
    echo = [text for text in texts for _ in range(body.n or 1)]
    grammar = await prepare_grammar(state, body)
    answer, exchange = await submit(
        state,
        body,
        prompts,
        limit_of(body.max_tokens, body.n_predict),
        body.logprobs,
        prefix="cmpl-",
        param="prompt",
        owner=owner,
        request_id=request_id_of(request.scope),
        default=DEFAULT_COMPLETION_TOKENS,
        grammar=grammar,
    )
    if body.stream:
        usage = StreamUsage.of(body, state.config)
        frames = completion_frames(exchange, answer, usage=usage, echo=echo)
        return EventStream(frames, holds=answer)
    return await whole_response(
        request, answer, partial(whole_completion, exchange, answer, echo=echo)
    )


def model_card(state: ModelState, adapter: str | None = None) -> ModelCard:
    name = state.model_id if adapter is None else adapter
    info = state.engine.info
    context = None if info is None else info.context_length
    started = state.server.started
    return ModelCard(
        id=name,
        parent=None if adapter is None else state.model_id,
        created=int(started),
        display_name=name,
        created_at=datetime.fromtimestamp(int(started), UTC).isoformat().replace("+00:00", "Z"),
        max_model_len=context,
        max_input_tokens=context,
        default_parameters=dict(state.sampling.values),
        state=state.engine.state.value,
        aliases=state.aliases if adapter is None else [],
        architecture=None if info is None else _modalities(info),
    )


def _props(state: ModelState) -> Props:
    info, tokenizer = state.serving()
    recommended: dict[str, Any] = dict(state.sampling.values)
    sampling = SamplingParams(**recommended)
    params = GenerationParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )
    template = tokenizer.chat_template
    return Props(
        default_generation_settings=GenerationSettings(n_ctx=info.context_length, params=params),
        total_slots=state.queue.slots,
        model_alias=state.model_id,
        model_path=state.model_id,
        chat_template="" if template is None else template.source,
        modalities=PropsModalities(vision=info.reads_pictures),
        build_info=f"appliance-{__version__}",
        is_sleeping=state.engine.state is EngineState.ASLEEP,
    )


def _modalities(info: EngineInfo) -> Modalities:
    return Modalities(
        input_modalities=["text", "image"] if info.reads_pictures else ["text"],
        output_modalities=["text"],
    )
