"""A model without a family of ours behind the endpoint: transformers' answers, and a banner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.sure_models import write_sure_model

from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

pytestmark = pytest.mark.model

PROMPTS = ["The capital of Japan is", "def add(a, b):\n    return", "One two three"]
TOKENS = 16


@pytest.fixture(scope="module")
def model(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, Tokenizer]:
    """A random model with a real model's tokenizer."""
    folder = tmp_path_factory.mktemp("helium")
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    made = write_sure_model(
        "helium",
        folder,
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    write_tokenizer_files(smollm2_gguf, folder)
    return made, folder, tokenizer


@pytest.fixture(scope="module")
def served(
    model: tuple[Any, Path, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from tests.e2e.conftest import Server

    log = tmp_path_factory.mktemp("server") / "log"
    exact = ("--dtype", "float32", "--kv-cache-dtype", "fp32")
    running = Server(log, str(model[1]), "--served-model-name", "random", *exact)
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.stop()


def test_completions_are_those_of_transformers(
    model: tuple[Any, Path, Tokenizer], served: Server
) -> None:
    made, _, tokenizer = model
    answers = served.client.post(
        "/v1/completions",
        json={
            "model": "random",
            "prompt": PROMPTS,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
    ).json()["choices"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
        found = made.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        assert answer["text"] == tokenizer.decode(found[0, len(ids) :].tolist())
    assert len({answer["text"] for answer in answers}) == len(PROMPTS)


def test_the_banner_and_health_say_who_executes_it(served: Server) -> None:
    assert "transformers' modules execute HeliumForCausalLM" in " ".join(served.log.split())
    assert served.client.get("/health").status_code == 200
