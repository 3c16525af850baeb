"""Random models of every family, small enough for each test to build its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 60,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small models gain nothing from threads, whose barriers are slow on a busy machine."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """A function that builds a random transformers model: `make_model(model_type, **settings)`.

    Weights are large enough, and biases and norms far enough from their usual start, for every
    part to show in the logits.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type: str, **settings: Any) -> Any:
        config = AutoConfig.for_model(model_type, **SIZES | settings)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 2:
                    parameter.copy_(spread * 1.5 * parameter.shape[1] ** -0.5)
                else:
                    start = 0.0 if name.endswith("bias") or model_type == "gemma3_text" else 1.0
                    parameter.copy_(start + 0.3 * spread)
        return model

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], Path]:
    """A function that writes a transformers model into a fresh folder."""

    def write(model: Any) -> Path:
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def token_ids() -> list[int]:
    """45 tokens: longer than any window and any original context of the small models."""
    return torch.randint(3, 97, (45,), generator=torch.Generator().manual_seed(2)).tolist()
