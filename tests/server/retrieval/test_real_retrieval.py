"""Vectors, scores and relevance over HTTP by the real engine equal transformers', for SmolLM2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.transformers_gguf import load_with_transformers

from appliance.engine.nouns.request import Pooling
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.model_files.retrieval_recipe import EmbeddingRecipe, RerankRecipe, RetrievalRecipe
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = ["The capital of Japan is Tokyo.", "Bread is made of flour, water, salt and yeast. " * 4]
QUESTION = "Does it rain in Oslo? Answer yes or no: {query}{document}"


class Oracle:
    """transformers' results for texts, in float32."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._model = load_with_transformers(path)
        self._tokenizer = tokenizer
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hidden(self, text: str) -> torch.Tensor:
        """Hidden states before the head, (num_tokens, hidden_size)."""
        return self._run(text)[0]

    def logprobs(self, text: str) -> torch.Tensor:
        """The log probability of each token but the first."""
        scores = self._run(text)[1][:-1].log_softmax(-1)
        return scores.gather(1, torch.tensor(self._ids(text)[1:])[:, None])[:, 0]

    def margin(self, text: str, *labels: str) -> float:
        """The last logit of the first label minus that of the second."""
        one, other = (self._tokenizer.encode(label, add_special_tokens=False) for label in labels)
        last = self._run(text)[1][-1]
        return float(last[one[0]] - last[other[0]])

    def _run(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of each token."""
        if text not in self._seen:
            ids = torch.tensor([self._ids(text)])
            with torch.inference_mode():
                hidden = self._model.model(ids).last_hidden_state
                self._seen[text] = hidden[0], self._model.lm_head(hidden)[0]
        return self._seen[text]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True)


async def vectors(running: Running, pooling: Pooling) -> torch.Tensor:
    assert running.state.tokenizer is not None
    running.state.tokenizer.retrieval = RetrievalRecipe(EmbeddingRecipe(pooling))
    answer = await running.http.post("/v1/embeddings", json={"input": TEXTS})
    return torch.tensor([one["embedding"] for one in answer.json()["data"]])


async def compare(running: Running, oracle: Oracle, *, closeness: float, error: float) -> None:
    """Compare everything with transformers.

    Args:
        running: the server.
        oracle: transformers.
        closeness: least cosine of a vector.
        error: largest mean difference of log probabilities and of a margin.
    """
    for pooling in (Pooling.LAST, Pooling.MEAN):
        hidden = [oracle.hidden(text) for text in TEXTS]
        pooled = [one[-1] if pooling is Pooling.LAST else one.mean(0) for one in hidden]
        expected = torch.nn.functional.normalize(torch.stack(pooled))
        found = await vectors(running, pooling)
        assert (found * expected).sum(-1).min() >= closeness, pooling
    for text in TEXTS:
        asked = {"echo": True, "logprobs": 0, "max_tokens": 0}
        answer: Any = (await running.complete(text, **asked)).json()
        scores = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
        assert (scores - oracle.logprobs(text)).abs().mean() <= error
        again: Any = (await running.complete(text, prompt_logprobs=0, max_tokens=1)).json()
        places = again["choices"][0]["prompt_logprobs"][1:]
        told = torch.tensor([one["logprob"] for place in places for one in place.values()])
        torch.testing.assert_close(told, scores, atol=1e-6, rtol=0)
    assert running.state.tokenizer is not None
    yes_no = RerankRecipe("this test", QUESTION, ("yes", "no"))
    running.state.tokenizer.retrieval = RetrievalRecipe(rerank=yes_no)
    body = {"text_1": "It is sunny.", "text_2": [" So", " It pours. So"]}
    answer = (await running.http.post("/v1/score", json=body)).json()
    for one, document in zip(answer["data"], body["text_2"], strict=True):
        text = QUESTION.format(query=body["text_1"], document=document)
        margin = math.log(one["score"] / (1 - one["score"]))
        assert margin == pytest.approx(oracle.margin(text, "yes", "no"), abs=2 * error)


async def test_the_cpu_library_stays_near_transformers(serve: Serve, smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    async with serve(
        str(smollm2_gguf),
        command=ENGINE_COMMAND,
        tokenizer=tokenizer,
        limits=SupervisionLimits(),
        device="cpu",
        threads=2,
        max_model_len=256,
        kv_cache_memory=2**26,
    ) as running:
        # In float32, with torch, everything agrees to 1e-5 and 1e-3.
        await compare(running, Oracle(smollm2_gguf, tokenizer), closeness=0.98, error=0.15)
