"""POST /api/embed and /api/embeddings: vectors in Ollama's shape."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from appliance.server.ollama.answers import Embedded
from appliance.server.ollama.lines import NANOSECONDS
from appliance.server.requests.answer_size import FLOAT_BYTES
from appliance.server.requests.schema import TermsFields
from appliance.server.retrieval.embedding import (
    EmbeddingOptions,
    embed,
    embedding_recipe,
    with_prompt,
)

if TYPE_CHECKING:
    from fastapi import Request

    from appliance.server.models.model_state import ModelState


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
