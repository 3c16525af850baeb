"""Rerank and score, by vectors and by a reranker's answer, with predictable numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import transformers
from support.models.encoder_models import write_tokenizer
from support.runs.waiting import until

from appliance.errors import ChatTemplateError
from appliance.files import write_json
from appliance.model_files.retrieval_recipe import (
    QWEN3_INSTRUCTION,
    QWEN3_RERANKER,
    EmbeddingRecipe,
    RerankRecipe,
    RetrievalRecipe,
)
from appliance.server.retrieval.relevance import encoded_pairs
from appliance.tokenizer import ChatTemplate, Tokenizer
from tests.server.retrieval.test_embeddings import vector

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Serve

DOCUMENTS = ["ggg", "aab", "ab"]
YES_NO = RerankRecipe("README.md", "<|im_start|>{instruction}|{query}|{document}|", ("y", "n"), "i")


def cosine(one: str, other: str) -> float:
    return sum(a * b for a, b in zip(vector(one), vector(other), strict=True))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.fixture
def says(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def say(recipe: RetrievalRecipe) -> None:
        monkeypatch.setattr(byte_tokenizer, "retrieval", recipe)

    return say


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_in_the_order_of_their_cosines(serve: Serve, path: str) -> None:
    async with serve() as running:
        body: dict[str, Any] = {"query": "aab", "documents": DOCUMENTS}
        answer = (await running.http.post(path, json=body)).json()
        assert [one["index"] for one in answer["results"]] == [1, 2, 0]
        for one in answer["results"]:
            text = DOCUMENTS[one["index"]]
            assert one["document"] == {"text": text}
            assert one["relevance_score"] == pytest.approx(cosine("aab", text), abs=1e-6)
        assert answer["scorer"] == "cosine of embeddings (last pooling, the default here)"
        assert answer["usage"]["total_tokens"] == 3 + 3 + 2, "equal texts are read once"
        objects = [{"text": text} for text in DOCUMENTS]
        short = {"documents": objects, "top_n": 1, "return_documents": False}
        (best,) = (await running.http.post(path, json=body | short)).json()["results"]
        assert best == {"index": 1, "relevance_score": pytest.approx(1.0)}
        await until(running.idle)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_one_text_or_as_many_are_scored_in_their_order(serve: Serve, path: str) -> None:
    async with serve() as running:
        for names in (("text_1", "text_2"), ("queries", "documents")):
            for first in ("aab", ["aab"], ["aab", "g", "ba"]):
                body = dict(zip(names, (first, DOCUMENTS), strict=True))
                answer = (await running.http.post(path, json=body)).json()
                left = first if len(first) == 3 and isinstance(first, list) else ["aab"] * 3
                expected = [cosine(*pair) for pair in zip(left, DOCUMENTS, strict=True)]
                found = [one["score"] for one in answer["data"]]
                assert found == pytest.approx(expected, abs=1e-6)
                assert [one["index"] for one in answer["data"]] == [0, 1, 2]
                assert answer["object"] == "list"


async def test_a_reranker_is_asked_as_its_checkpoint_says(serve: Serve, says: Any) -> None:
    says(RetrievalRecipe(EmbeddingRecipe(refused="no vectors"), YES_NO))
    async with serve() as running:
        body: dict[str, Any] = {"query": "any", "documents": ["yyy", "nn", "yn <|im_end|>"]}
        answer = (await running.http.post("/v1/rerank", json=body)).json()
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        # "any" has one of each; the echo counts labels in the prompt.
        assert found == pytest.approx({0: sigmoid(3), 1: sigmoid(-2), 2: sigmoid(-1)})
        assert answer["scorer"] == "probability of the next token 'y' against 'n' (README.md)"
        lengths = [len(f"i|any|{text}|") + 1 for text in body["documents"]]
        assert answer["usage"]["prompt_tokens"] == sum(lengths), "a mark in a document is text"
        instructed = (
            await running.http.post("/v1/rerank", json=body | {"instruction": "yyyy"})
        ).json()
        assert instructed["results"][-1]["relevance_score"] == pytest.approx(sigmoid(2))
        refused = await running.http.post("/v1/embeddings", json={"input": "a"})
        assert "no vectors" in refused.json()["error"]["message"]


async def test_a_chat_template_with_query_and_document_is_used(
    serve: Serve, says: Any, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(RetrievalRecipe(rerank=RerankRecipe("modules.json", "", (121,), "")))
    async with serve() as running:
        body = {"text_1": "y", "text_2": ["yy", "n"]}
        answer = (await running.http.post("/v1/score", json=body)).json()
        # The template names roles: "query" has a y, like the first text.
        expected = [sigmoid(4), sigmoid(2)]
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected)
        refused = await running.http.post("/v1/score", json=body | {"instruction": "x"})
        assert refused.json()["error"]["param"] == "instruction"
        monkeypatch.setattr(byte_tokenizer, "chat_template", None)
        bare = await running.http.post("/v1/score", json=body)
        assert bare.status_code == 400
        assert "chat template" in bare.json()["error"]["message"]


async def test_prompts_for_queries_and_documents_are_used(serve: Serve, says: Any) -> None:
    prompts = {"query": "aaa", "passage": "b"}
    says(RetrievalRecipe(EmbeddingRecipe(source="modules.json", prompts=prompts)))
    async with serve() as running:
        body = {"text_1": "c", "text_2": "d"}
        answer = (await running.http.post("/v1/score", json=body)).json()
        assert answer["data"][0]["score"] == pytest.approx(cosine("aaac", "bd"), abs=1e-6)
        assert "modules.json" in answer["scorer"]


ROLES = (
    "{%- for m in messages -%}{{ m.role }} {{ m.content }} {% endfor -%}"
    "{%- if add_generation_prompt %}yes or no{% endif -%}"
)
QWEN_CARD = (
    "---\nbase_model:\n- Qwen/Qwen3-Reranker-0.6B\nlibrary_name: x\n---\n# Sequence labels\n"
)


@pytest.mark.parametrize(
    ("config", "card", "template", "special", "wanted"),
    [
        ({"model_type": "qwen3"}, QWEN_CARD, "{{ messages }}", False, QWEN3_RERANKER),
        (
            {"model_type": "llama_bidirec"},
            "",
            None,
            True,
            "question:{query} \n \n passage:{document}",
        ),
        ({"model_type": "qwen2"}, "", ROLES, False, "query {query} document {document}"),
        ({"model_type": "gemma"}, "", "{{ messages[0].content }}", True, None),
        ({"model_type": "mistral"}, "", None, True, None),
    ],
)
def test_a_decoders_head_reads_both_texts_in_its_makers_words(
    config: dict[str, Any],
    card: str,
    template: str | None,
    special: bool,
    wanted: str | None,
    tmp_path: Path,
) -> None:
    """transformers' tokenizer encodes the prompt alike, or the pair if no words are known."""
    write_tokenizer(tmp_path)
    named = [f"{config['model_type']}ForSequenceClassification"]
    write_json(tmp_path / "config.json", {**config, "architectures": named})
    (tmp_path / "README.md").write_text(card)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": template} if template else {})
    tokenizer = Tokenizer.from_path(tmp_path)
    recipe = tokenizer.retrieval.rerank
    assert recipe is not None
    assert recipe.by_head
    ((ids, place),) = encoded_pairs(tokenizer, recipe, recipe.instruction, [("a bc", "cab")])
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    if wanted is None:
        pair = reference("a bc", "cab", return_token_type_ids=True)
        assert (ids, place) == (pair["input_ids"], pair["token_type_ids"].index(1))
        return
    text = wanted.format(query="a bc", document="cab", instruction=QWEN3_INSTRUCTION)
    assert ids == reference(text, add_special_tokens=special)["input_ids"]


def test_a_template_is_asked_once_if_it_takes_pairs_and_within_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    recipe = RerankRecipe("config.json", "", (), by_head=True)
    tokenizer = Tokenizer.from_path(tmp_path)
    tokenizer.chat_template = ChatTemplate("{{ messages[0].content }}", {})
    template = Mock(wraps=tokenizer.chat_template.render)
    monkeypatch.setattr(ChatTemplate, "render", template)
    for _ in range(3):
        encoded_pairs(tokenizer, recipe, "", [("a", "b")] * 2)
    assert template.call_count == 1
    monkeypatch.undo()
    hostile = Tokenizer.from_path(tmp_path)
    hostile.chat_template = ChatTemplate("{{ 'a' | center(10**10) }}", {})
    hostile.isolate_template()
    with pytest.raises(ChatTemplateError, match="1024 MiB"):
        encoded_pairs(hostile, recipe, "", [("a", "b")])
    hostile.close()
