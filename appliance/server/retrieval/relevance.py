"""Scores pairs of texts, by a reranker's next token or the cosine of two vectors."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import Pooling
from appliance.errors import ChatTemplateError, RequestError
from appliance.model_files.retrieval_recipe import EmbeddingRecipe
from appliance.server.http.request_middleware import key_name
from appliance.server.retrieval.embedding import (
    MAX_INPUTS,
    EmbeddingOptions,
    begin_embedding,
    begin_reading,
    embedding_recipe,
    prompted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Scope

    from appliance.model_files.retrieval_recipe import RerankRecipe
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import TermsFields
    from appliance.server.retrieval.readings import Readings
    from appliance.tokenizer import Tokenizer

QUERY_PROMPTS = ("query", "Retrieval-query")  # names of a checkpoint's own prompts, first wins
DOCUMENT_PROMPTS = ("document", "passage", "Retrieval-document")


@dataclass(frozen=True, slots=True)
class RelevanceJob:
    """Pairs of query and document for the engine.

    Attributes:
        readings: the engine's; enter them for the scores.
        scorer: name of the score, for display.
        pairs: indices of each pair's two vectors; None if a pair is one prompt.
        recipe: makes the vectors.
    """

    readings: Readings
    scorer: str
    pairs: list[tuple[int, int]] | None
    recipe: EmbeddingRecipe = field(default_factory=EmbeddingRecipe)

    async def scores(self) -> list[float]:
        """Return each pair's score; raises like `Readings.pooled`."""
        pooled = await self.readings.pooled()
        if self.pairs is None:
            return [_probability(array("f", content)) for content in pooled]
        from appliance.server.retrieval.vectors import cosines, matrix_of  # slow to import

        return cosines(matrix_of(pooled, self.recipe, dimensions=None), self.pairs)


async def begin_judging(
    state: ModelState,
    fields: TermsFields,
    scope: Scope,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
) -> RelevanceJob:
    """Prepare pairs in the checkpoint's form.

    Args:
        scope: ASGI scope of the HTTP request, with its key and id.
        pairs: queries with documents.
        param: field of the documents.

    Raises:
        RequestError: the request needs something unsupported.
    """
    _, tokenizer = state.serving()
    if len(pairs) > MAX_INPUTS:
        raise RequestError(
            f"the request has {len(pairs)} pairs; at most {MAX_INPUTS} are accepted", param=param
        )
    recipe = tokenizer.retrieval.rerank
    if recipe is None:
        return await _compare(state, fields, scope, pairs, instruction, param)
    if instruction is not None and not (recipe.instruction or "{instruction}" in recipe.template):
        raise RequestError("this reranker takes no instruction", param="instruction")
    owner, size = key_name(scope), sum(len(one) + len(other) for one, other in pairs)
    wanted = recipe.instruction if instruction is None else instruction
    if recipe.by_head:
        encoded = await state.texts.run(
            lambda: encoded_pairs(tokenizer, recipe, wanted, pairs), owner=owner, size=size
        )
        prompts, second_texts = [ids for ids, _ in encoded], [place for _, place in encoded]
        readings = begin_reading(
            state, fields, scope, prompts, param, Pooling.CLS, second_texts=second_texts
        )
        return RelevanceJob(
            readings, f"probability by the model's own head ({recipe.source})", None
        )
    labels = _labels(tokenizer, recipe)
    prompts = await state.texts.run(
        lambda: [_prompt(tokenizer, recipe, wanted, *pair) for pair in pairs],
        owner=owner,
        size=size,
    )
    readings = begin_reading(state, fields, scope, prompts, param, Pooling.LAST, labels)
    said = " against ".join(repr(tokenizer.token_text(label)) for label in labels)
    return RelevanceJob(readings, f"probability of the next token {said} ({recipe.source})", None)


async def _compare(
    state: ModelState,
    fields: TermsFields,
    scope: Scope,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
) -> RelevanceJob:
    if instruction is not None:
        raise RequestError(
            "this model is no reranker, so vectors are compared, which takes no instruction",
            param="instruction",
        )
    recipe = embedding_recipe(state)
    names = [_first(own, recipe.prompts) for own in (QUERY_PROMPTS, DOCUMENT_PROMPTS)]
    texts: dict[str, int] = {}

    def place(text: str, name: str | None) -> int:
        return texts.setdefault(prompted(text, recipe, name), len(texts))

    numbers = [(place(query, names[0]), place(document, names[1])) for query, document in pairs]
    readings = await begin_embedding(state, EmbeddingOptions([*texts], fields, scope, param))
    how = f"{recipe.pooling.value} pooling, {recipe.source or 'the default here'}"
    return RelevanceJob(readings, f"cosine of embeddings ({how})", numbers, recipe)


def _first(names: Sequence[str], known: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in known), None)


def _labels(tokenizer: Tokenizer, recipe: RerankRecipe) -> tuple[int, ...]:
    labels = []
    for label in recipe.labels:
        ids = [label]
        if isinstance(label, str):
            ids = list(tokenizer.encode(label, add_special_tokens=False))
        if len(ids) != 1 or not isinstance(ids[0], int) or ids[0] >= tokenizer.vocab_size:
            raise RequestError(
                f"{recipe.source} says that this reranker answers with {label!r:.40}, which is no "
                "token of its vocabulary; the checkpoint is damaged",
                code="rerank_unsupported",
            )
        labels.append(ids[0])
    return tuple(labels)


def encoded_pairs(
    tokenizer: Tokenizer, recipe: RerankRecipe, instruction: str, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], int]]:
    """Return each pair's ids, and where its second text begins; behind all if that is not known."""
    if not (recipe.template or tokenizer.template_takes_pairs):
        return [tokenizer.encode_pair(*pair) for pair in pairs]
    prompts = [_prompt(tokenizer, recipe, instruction, *pair) for pair in pairs]
    return [(ids, len(ids)) for ids in prompts]


def _turns(query: str, document: str, instruction: str) -> list[dict[str, str]]:
    turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return [{"role": "system", "content": instruction}, *turns] if instruction else turns


def _prompt(
    tokenizer: Tokenizer, recipe: RerankRecipe, instruction: str, query: str, document: str
) -> list[int]:
    if recipe.template:
        values = {"instruction": instruction, "query": query, "document": document}
        return tokenizer.encode_filled(recipe.template, values, add_special_tokens=recipe.framed)
    if tokenizer.chat_template is None:
        raise ChatTemplateError(
            f"{recipe.source} makes a reranker of this model, but it has no chat template that "
            "says how a query and a document are put together; use the whole checkpoint"
        )
    # A head judges what was said, as in sentence-transformers and vLLM; a label is an answer.
    turns = _turns(query, document, instruction)
    return tokenizer.encode_chat(turns, add_generation_prompt=not recipe.by_head)


def _probability(logits: array[float]) -> float:
    """Return the first label's probability against the second, or by its logit alone."""
    logit = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
