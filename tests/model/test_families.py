"""Every family against transformers, on small random models in float32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dense_models import DENSE, longrope
from relatives import FOLDERS, RELATIVES
from safetensors.torch import save_file
from teacher_forcing import logits_of

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

    transformers has the setting of Gemma 3, but passes it on only if the caller does.
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
    assert theirs.std() > 0.5  # a model that says something
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


def test_internlm2_is_llama_with_rows_by_key_head(
    make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    """Its maker's code takes a key head's queries, its key and its value from neighbouring rows."""
    model = make_model("llama", num_key_value_heads=2)
    path = save(model)
    state = model.state_dict()
    stored = {
        "model.tok_embeddings.weight": state["model.embed_tokens.weight"],
        "model.norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for index in range(model.config.num_hidden_layers):
        ours = theirs = f"model.layers.{index}."
        parts = [state[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
        groups = [part.unflatten(0, (2, -1)) for part in parts]
        stored[f"{ours}attention.wqkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1)
        for own, name in (
            ("attention.wo", "self_attn.o_proj"),
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            stored[f"{ours}{own}.weight"] = state[f"{theirs}{name}.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors"
    )
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(our_logits(path, REFERENCE, token_ids), reference_logits(model, token_ids))
