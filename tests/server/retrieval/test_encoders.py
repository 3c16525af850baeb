"""Encoders behind the endpoint: their vectors and scores equal transformers'."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.models.encoder_models import make, make_decoder, write_tokenizer

from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.files import write_json
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Serve

pytestmark = pytest.mark.slow

TEXTS = ["The capital of Japan is Tokyo.", "Bread is made of flour, water, salt. " * 20, "Hm"]
REAL: dict[str, Any] = {"command": ENGINE_COMMAND, "device": "cpu", "threads": 2}


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, as scripts/test unpacks it from a wheel."""
    folder = os.environ.get("APPLIANCE_MODELS_DIR")
    path = Path(folder or ".") / "all-MiniLM-L6-v2"
    if not (path / "model.safetensors").is_file():
        pytest.skip("all-MiniLM-L6-v2 is not there; scripts/test fetches it")
    return path


@pytest.mark.model
async def test_a_real_model_gives_the_vectors_of_transformers(serve: Serve, minilm: Path) -> None:
    # The checkpoint's fast tokenizer would cut texts at 128 tokens.
    reference = transformers.BertTokenizer(str(minilm / "vocab.txt"))
    oracle = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    async with serve(
        str(minilm), tokenizer=Tokenizer.from_path(minilm), limits=SupervisionLimits(), **REAL
    ) as running:
        answer = await running.http.post("/v1/embeddings", json={"input": TEXTS})
        assert answer.status_code == 200, answer.text
        body = {"query": "What is bread?", "documents": TEXTS}
        ranked = (await running.http.post("/v1/rerank", json=body)).json()
        refused = await running.complete("Once upon a time")
    for text, row in zip(TEXTS, answer.json()["data"], strict=True):
        with torch.inference_mode():
            states = oracle(**reference(text, return_tensors="pt")).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
        error = (torch.tensor(row["embedding"]) - wanted).abs().max()
        assert error < 1e-5, text
    assert ranked["results"][0]["index"] == 1
    assert refused.status_code == 400
    assert "is an encoder" in refused.text


async def test_a_head_ranks_pairs_over_http(serve: Serve, tmp_path: Path) -> None:
    oracle = make("bert", tmp_path, ranks=True).oracle
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    query, documents = "a bc", ["cab", "zzz [SEP] x"]
    async with serve(
        str(tmp_path), tokenizer=tokenizer, limits=SupervisionLimits(), **REAL
    ) as running:
        body = {"text_1": query, "text_2": documents}
        answer = (await running.http.post("/v1/score", json=body)).json()
        refused = await running.http.post("/v1/embeddings", json={"input": "a"})
        steered = {**body, "instruction": "be kind"}
        instructed = await running.http.post("/v1/score", json=steered)
    assert refused.status_code == 400
    assert "makes a reranker of it" in refused.text
    assert "takes no instruction" in instructed.text
    assert "own head (config.json)" in answer["scorer"]
    for document, row in zip(documents, answer["data"], strict=True):
        plain = [tokenizer.encode(t, add_special_tokens=False, allow_special=False)
                 for t in (query, document)]  # fmt: skip
        ids = torch.tensor([[2, *plain[0], 3, *plain[1], 3]])
        types = torch.tensor([[0] * (len(plain[0]) + 2) + [1] * (len(plain[1]) + 1)])
        with torch.inference_mode():
            out = oracle(ids, attention_mask=torch.ones_like(ids), token_type_ids=types)
        assert row["score"] == pytest.approx(float(out.logits[0, 0].sigmoid()), abs=1e-5)


async def test_embeddinggemma_is_served_with_its_linears(serve: Serve, tmp_path: Path) -> None:
    """The layout is google/embeddinggemma-300m's: mean, two linears without bias, length 1."""
    oracle = make_decoder("embeddinggemma", tmp_path).oracle
    write_tokenizer(tmp_path)
    torch.manual_seed(5)
    linears = [torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 48, bias=False)]
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    folders = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    for folder in folders[1:4]:
        (tmp_path / folder).mkdir()
    modules = [
        {"idx": number, "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    for folder, linear in zip(folders[2:4], linears, strict=True):
        settings = {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        write_json(tmp_path / folder / "config.json", settings)
        weights = {"linear.weight": linear.weight.detach()}
        save_file(weights, tmp_path / folder / "model.safetensors")
    prompts = {"query": "ask: ", "document": "said: "}
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": prompts})
    tokenizer, texts = Tokenizer.from_path(tmp_path), ["a bc", "zzz " * 30]
    async with serve(
        str(tmp_path), tokenizer=tokenizer, limits=SupervisionLimits(), **REAL
    ) as running:
        plain = await running.http.post("/v1/embeddings", json={"input": texts})
        asked = {"input": texts, "prompt_name": "query"}
        prompted = await running.http.post("/v1/embeddings", json=asked)
        cut = await running.http.post("/v1/embeddings", json={"input": texts, "dimensions": 16})
        name = (await running.http.get("/v1/models")).json()["data"][0]["id"]
        ollama = await running.http.post("/api/embed", json={"model": name, "input": texts})
        beyond = await running.http.post("/v1/embeddings", json={"input": "a", "dimensions": 49})
        chat = await running.complete("Once upon a time")
    assert "this model's vectors have 48" in beyond.text
    assert chat.status_code == 400
    found = [[row["embedding"] for row in one.json()["data"]] for one in (plain, prompted, cut)]
    for prefix, rows in (("", found[0]), ("ask: ", found[1]), ("", ollama.json()["embeddings"])):
        for text, row in zip(texts, rows, strict=True):
            ids = torch.tensor([tokenizer.encode(prefix + text, add_special_tokens=True)])
            with torch.inference_mode():
                x = oracle(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
                for linear in linears:
                    x = linear(x)
            wanted = torch.nn.functional.normalize(x, dim=0)
            assert (torch.tensor(row) - wanted).abs().max() < 1e-5, text
    for whole, short in zip(found[0], found[2], strict=True):
        wanted = torch.nn.functional.normalize(torch.tensor(whole[:16]), dim=0)
        torch.testing.assert_close(torch.tensor(short), wanted)


def test_a_wordpiece_tokenizer_spells_its_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", {})
    tokenizer = Tokenizer.from_path(tmp_path)
    ids = tokenizer.encode("Ab c", add_special_tokens=True)
    assert b"".join(map(tokenizer.visible_bytes, ids)) == b" ab c"
    assert tokenizer.encode_pair("a", "b [SEP]")[1] == 3
    assert tokenizer.encode_pair("a", "b [SEP]")[0].count(3) == 2
