"""Embeds texts with the served model, for every protocol."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import RequestError
from appliance.server.http.client_gone import unless_disconnected
from appliance.server.http.errors import request_id_of
from appliance.server.http.request_middleware import key_name
from appliance.server.requests.answer_size import check_vectors
from appliance.server.requests.prompt import completion_prompts
from appliance.server.requests.sampling import completion_budget
from appliance.server.requests.terms import Terms
from appliance.server.retrieval.readings import Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from fastapi import Request
    from numpy.typing import NDArray
    from starlette.types import Scope

    from appliance.engine.nouns.request import Pooling
    from appliance.model_files.retrieval_recipe import EmbeddingRecipe
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import TermsFields

MAX_INPUTS = 2048  # per request, as OpenAI has it

Inputs = str | list[str | int | list[int]]

# The result of a request that only reads.
READ_ONLY = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """A client's request for vectors.

    Attributes:
        inputs: texts or token ids, as in `completion_prompts`.
        scope: ASGI scope of the HTTP request, with its key and id.
        param: name of the inputs' field.
        dimensions: length to cut vectors to; None keeps all.
        bytes_per_value: in the answer.
    """

    inputs: Inputs
    terms: TermsFields
    scope: Scope
    param: str = "input"
    dimensions: int | None = None
    bytes_per_value: float = 0.0


def embedding_recipe(state: ModelState) -> EmbeddingRecipe:
    """Return the served model's embedding recipe.

    Raises:
        RequestError: the model cannot embed; the message says why.
    """
    recipe = state.serving()[1].retrieval.embedding
    if recipe.refused:
        raise RequestError(
            f"this model makes no embeddings here: {recipe.refused}", code="embeddings_unsupported"
        )
    return recipe


async def embed(
    state: ModelState, request: Request, wanted: EmbeddingOptions
) -> tuple[Callable[[], NDArray[np.float32]], int]:
    """Read texts, unless the client disconnects.

    Returns:
        A function that makes the vectors, (num_inputs, dimensions), too slow for the event loop;
            and
        the number of tokens read.

    Raises:
        RequestError: the request needs something unsupported, or the queue is full.
    """
    with await begin_embedding(state, wanted) as readings:
        pooled = await unless_disconnected(request.receive, readings.pooled())

    def vectors() -> NDArray[np.float32]:
        from appliance.server.retrieval.vectors import matrix_of  # slow to import

        return matrix_of(pooled, embedding_recipe(state), dimensions=wanted.dimensions)

    return vectors, readings.prompt_tokens


async def begin_embedding(state: ModelState, wanted: EmbeddingOptions) -> Readings:
    """Check everything and prepare what is to be read.

    Raises:
        RequestError: the request needs something unsupported.
    """
    info, _ = state.serving()
    recipe = embedding_recipe(state)
    width = recipe.width(info.hidden_size)
    if wanted.dimensions is not None and wanted.dimensions > width:
        raise RequestError(
            f"dimensions is {wanted.dimensions}; this model's vectors have {width}",
            param="dimensions",
        )
    prompts = await completion_prompts(
        state, wanted.inputs, key_name(wanted.scope), param=wanted.param, most=MAX_INPUTS
    )
    dimensions = wanted.dimensions or width
    check_vectors(len(prompts), dimensions, wanted.bytes_per_value, param=wanted.param)
    return begin_reading(state, wanted.terms, wanted.scope, prompts, wanted.param, recipe.pooling)


def begin_reading(
    state: ModelState,
    fields: TermsFields,
    scope: Scope,
    prompts: Sequence[list[int]],
    param: str,
    pooling: Pooling,
    labels: tuple[int, ...] = (),
    second_texts: Sequence[int] = (),
) -> Readings:
    """Prepare prompts to read without generating.

    Args:
        second_texts: where each pair's second text begins, if the prompts are pairs.

    Raises:
        ContextLengthError: a prompt does not fit.
    """
    info, _ = state.serving()
    terms, name = Terms.of(fields, state, key_name(scope)), f"read-{secrets.token_hex(12)}"
    for prompt in prompts:
        completion_budget(len(prompt), 0, info, param=param)
    requests = [
        terms.request(f"{name}-{number}", prompt, READ_ONLY, pooling, labels)
        for number, prompt in enumerate(prompts)
    ]
    if second_texts:
        requests = [
            msgspec.structs.replace(one, second_text=place)
            for one, place in zip(requests, second_texts, strict=True)
        ]
    return Readings(state, requests, request_id=request_id_of(scope))


def with_prompt(inputs: Inputs, recipe: EmbeddingRecipe, name: str | None) -> Inputs:
    """Prefix texts with one of the checkpoint's prompts; keep token ids unchanged.

    Args:
        name: the prompt's name; None for the default, if any.

    Raises:
        RequestError: no prompt has this name.
    """
    if name is not None and name not in recipe.prompts:
        known = ", ".join(sorted(recipe.prompts)) or "none"
        raise RequestError(
            f"this model has no prompt {name[:100]!r}; those it has: {known}", param="prompt_name"
        )
    if isinstance(inputs, str):
        return prompted(inputs, recipe, name)
    return [prompted(one, recipe, name) if isinstance(one, str) else one for one in inputs]


def prompted(text: str, recipe: EmbeddingRecipe, name: str | None) -> str:
    """Prefix a text with the named or the default prompt."""
    return recipe.prompts.get(name or recipe.default_prompt or "", "") + text
