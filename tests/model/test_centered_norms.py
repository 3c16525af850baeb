"""OPT and Falcon, whose norms subtract the mean, against transformers in both executors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.native_models import native
from support.models.teacher_forcing import logits_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import CPU, REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {"hidden_size": 96}  # 6 heads of 16
CUTS = ([7, 1, 9, 20, 1, 1, 6], [1] * 45)


@pytest.mark.parametrize("case", CENTERED)
def test_both_executors_equal_transformers_however_a_prompt_is_cut(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model_type, settings = CENTERED[case]
    model = make_model(model_type, **SIZES | settings)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5  # the logits vary
    source = open_model(tmp_path)
    for backend in (REFERENCE, CPU):
        decoder = load_decoder(source, backend, torch.device("cpu"), torch.float32)
        torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)
    cut = logits_of(decoder, token_ids, chunks=CUTS[0], block_table=(5, 2, 7))
    torch.testing.assert_close(cut, expected, atol=1e-4, rtol=0)
    assert why_unsupported(source) is None
    whole = logits_of(native(tmp_path), token_ids)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    shared_out = native(tmp_path, threads=3)
    for chunks in CUTS:
        found = logits_of(shared_out, token_ids, chunks=chunks, block_table=(5, 2, 7))
        assert torch.equal(found, whole), chunks


def test_a_position_behind_the_table_is_refused_by_the_library(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, settings = CENTERED["opt"]
    small = {"max_position_embeddings": 8}
    make_model(model_type, **SIZES | settings | small).save_pretrained(tmp_path)
    decoder = native(tmp_path)
    assert logits_of(decoder, [5] * 8).shape[0] == 8
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        logits_of(decoder, [5] * 9)


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("falcon", {"alibi": True}, "alibi = True is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        ("falcon-new", {"parallel_attn": False}, "parallel_attn = False .*new_decoder"),
        ("falcon-new", {"num_kv_heads": 4}, "num_kv_heads = 4 .*divisor of num_attention_heads, 6"),
        ("falcon-new", {"num_kv_heads": 3}, r"query_key_value.weight has shape \(160, 96\)"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
        ("opt", {"max_position_embeddings": 64}, r"embed_positions.weight has shape \(130, 96\)"),
        ("opt", {"word_embed_proj_dim": 48}, r"embed_tokens.weight has shape \(97, 96\)"),
        ("opt", {"activation_function": "tanh"}, "activation_function = 'tanh'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    case: str,
    change: dict[str, Any],
    said: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model_type, settings = CENTERED[case]
    make_model(model_type, **SIZES | settings).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        open_model(tmp_path)
