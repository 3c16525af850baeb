"""Every family against transformers, on small random models in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.dense_models import DENSE, longrope
from support.models.relatives import FOLDERS, RELATIVES
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.operations import Backend
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = DENSE | RELATIVES | FOLDERS


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits of transformers (num_tokens, vocab_size), with Gemma's cap of scores applied.

    transformers has Gemma 3's setting, but applies it only if the caller passes it.
    """
    extra = {}
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap is not None and model.config.model_type == "gemma3_text":
        extra["softcap"] = cap
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), **extra).logits[0]
    return logits


def our_logits(
    path: Path, backend: Backend, token_ids: list[int], context_length: int | None = None
) -> torch.Tensor:
    decoder = load_decoder(
        open_model(path),
        backend,
        torch.device("cpu"),
        torch.float32,
        context_length=context_length,
    )
    return logits_of(decoder, token_ids)


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.5  # the logits vary
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.99


@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str,
    backend: Backend,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings = CASES[case]
    model = make_model(model_type, **settings)
    assert_equal_logits(
        our_logits(save(model), backend, token_ids), reference_logits(model, token_ids)
    )


def test_longrope_is_short_where_the_context_is(
    make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    settings = {
        "rope_parameters": longrope(5, 64),
        "original_max_position_embeddings": 64,
    }
    model = make_model("phi3", **settings)
    path = save(model)
    theirs = reference_logits(model, token_ids)  # 45 tokens: transformers takes the short factors
    assert_equal_logits(our_logits(path, REFERENCE, token_ids, context_length=64), theirs)
    long = our_logits(path, REFERENCE, token_ids, context_length=65)
    assert (long - theirs).abs().max() > 0.1
