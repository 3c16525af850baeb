"""Random models of every family, small enough for each test to build its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.native_models import ISAS, LIBRARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from appliance.kernels.cpu.structs import Isa

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
    """Use one thread: small models gain nothing from more, and barriers are slow on a busy CPU."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Use each instruction set of the CPU library that this processor has."""
    before = LIBRARY.ap_current_isa()
    assert LIBRARY.ap_use_isa(request.param) == 0
    yield request.param
    LIBRARY.ap_use_isa(before)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """A function that builds a random transformers model: `make_model(model_type, **settings)`.

    Weights are so large, and biases and norms so far from their initial values, that every part
    shows in the logits.
    """

    def make(model_type: str, **settings: Any) -> Any:
        model = random_model(model_type, "eager", **SIZES | settings)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            kept = ("correction_bias", "layer_scalar")
            buffers = [item for item in model.named_buffers() if item[0].endswith(kept)]
            for name, parameter in [*model.named_parameters(), *buffers]:
                spread = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() >= 2:
                    parameter.copy_(spread * 1.5 * parameter.shape[-1] ** -0.5)
                else:
                    about_1 = (
                        model_type in ("gemma", "gemma2")
                        or model_type.startswith(("gemma3", "qwen3_5", "qwen3_next"))
                    ) and "linear" not in name
                    start = 0.0 if name.endswith("bias") or about_1 else 1.0
                    parameter.copy_(start + 0.3 * spread)
                if model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
                    parameter.mul_(parameter.shape[0] ** -0.5)  # it has no other scale
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
    """45 tokens, more than any window and any original context of the small models."""
    return torch.randint(3, 97, (45,), generator=torch.Generator().manual_seed(2)).tolist()
