"""The routes about texts: embeddings, relevance, tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from appliance.errors import RequestError
from appliance.server.http.body import body_size
from appliance.server.http.client_gone import unless_disconnected
from appliance.server.http.errors import json_response
from appliance.server.http.openapi import describes
from appliance.server.http.request_middleware import key_name
from appliance.server.requests.answer_size import BASE64_BYTES, FLOAT_BYTES
from appliance.server.requests.intake import take_body
from appliance.server.retrieval.answers import (
    Detokenized,
    EmbeddingList,
    FoundDocument,
    Ranked,
    ReadUsage,
    RerankAnswer,
    Score,
    ScoreList,
    Tokenized,
    TokenizerInfo,
)
from appliance.server.retrieval.embedding import (
    EmbeddingOptions,
    embed,
    embedding_recipe,
    with_prompt,
)
from appliance.server.retrieval.relevance import begin_judging
from appliance.server.retrieval.schema import (
    EMBEDDINGS,
    HARMLESS,
    RELEVANCE,
    TOKENS,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from appliance.server.retrieval.tokens import detokenized, tokenized, tokenizer_info

if TYPE_CHECKING:
    from appliance.server.models.state import ServerState
    from appliance.server.retrieval.readings import Readings
    from appliance.server.retrieval.relevance import RelevanceJob


def retrieval_router(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", **describes(EmbeddingRequest, EmbeddingList))
    async def embeddings(request: Request) -> Response:
        state, body = await take_body(server, request, EmbeddingRequest, EMBEDDINGS, HARMLESS)
        base64 = body.encoding_format == "base64"
        wanted = EmbeddingOptions(
            with_prompt(body.input, embedding_recipe(state), body.prompt_name),
            body,
            request.scope,
            dimensions=body.dimensions,
            bytes_per_value=BASE64_BYTES if base64 else FLOAT_BYTES,
        )
        vectors, num_tokens = await embed(state, request, wanted)

        def build() -> Response:
            from appliance.server.retrieval.vectors import embeddings_of

            return json_response(
                EmbeddingList(
                    data=embeddings_of(vectors(), base64=base64),
                    model=state.model_id,
                    usage=ReadUsage(num_tokens, num_tokens),
                )
            )

        return await asyncio.to_thread(build)

    async def rerank(request: Request) -> Response:
        state, body = await take_body(server, request, RerankRequest, RELEVANCE, HARMLESS)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        judged = await begin_judging(
            state,
            body,
            request.scope,
            [(body.query, text) for text in texts],
            body.instruction,
            "documents",
        )
        scores = await _judge(request, judged)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        results = [Ranked(index=place, relevance_score=scores[place]) for place in order]
        if body.return_documents is not False:
            for one in results:
                one.document = FoundDocument(texts[one.index])
        return json_response(
            RerankAnswer(
                id=f"rerank-{secrets.token_hex(12)}",
                model=state.model_id,
                usage=_usage(judged.readings),
                results=results[: body.top_n or None],
                scorer=judged.scorer,
            )
        )

    async def score(request: Request) -> Response:
        state, body = await take_body(server, request, ScoreRequest, RELEVANCE, HARMLESS)
        pairs, param = pairs_of(body)
        judged = await begin_judging(state, body, request.scope, pairs, body.instruction, param)
        scores = await _judge(request, judged)
        return json_response(
            ScoreList(
                id=f"score-{secrets.token_hex(12)}",
                created=int(time.time()),
                model=state.model_id,
                data=[Score(index=number, score=one) for number, one in enumerate(scores)],
                usage=_usage(judged.readings),
                scorer=judged.scorer,
            )
        )

    # Jina's path, Cohere's and vLLM's.
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        router.post(path, **describes(RerankRequest, RerankAnswer))(rerank)
    for path in ("/v1/score", "/score"):
        router.post(path, **describes(ScoreRequest, ScoreList))(score)

    @router.post("/tokenize", **describes(TokenizeRequest, Tokenized))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a chat."""
        state, body = await take_body(server, request, TokenizeRequest, TOKENS, HARMLESS)
        owner, size = key_name(request.scope), body_size(request.scope)
        return json_response(await tokenized(state, body, owner, size))

    @router.get("/tokenizer_info", **describes(None, TokenizerInfo))
    async def info() -> Response:
        """Describe the tokenizer to evaluation harnesses, which send token ids."""
        return json_response(tokenizer_info(server.default))

    @router.post("/detokenize", **describes(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, control tokens included."""
        state, body = await take_body(server, request, DetokenizeRequest, {}, set())
        return json_response(await detokenized(state, body, key_name(request.scope)))

    return router


async def _judge(request: Request, judged: RelevanceJob) -> list[float]:
    with judged.readings:
        return await unless_disconnected(request.receive, judged.scores())


def _usage(readings: Readings) -> ReadUsage:
    return ReadUsage(readings.prompt_tokens, readings.prompt_tokens)


def pairs_of(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs, and the field of the second texts.

    Raises:
        RequestError: there are none, or their numbers do not match.
    """
    by_number, by_role = (body.text_1, body.text_2), (body.queries, body.documents)
    names = ("text_1", "text_2")
    if any(by_role):
        names = ("queries", "documents")
        if any(by_number):
            raise RequestError(
                "give the texts as text_1 and text_2 or as queries and documents", param="text_1"
            )
    given = by_role if any(by_role) else by_number
    for name, texts in zip(names, given, strict=True):
        if texts is None:
            raise RequestError(f"{name} is missing; a score is of two texts", param=name)
    first, second = ([one] if isinstance(one, str) else list(one or ()) for one in given)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send one, or as many",
            param=names[0],
        )
    if len(first) == 1:
        first *= len(second)
    return list(zip(first, second, strict=True)), names[1]
