"""Families for which transformers has no class, against relatives with the same arithmetic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.makers_models import MAKERS, save_as_maker
from support.models.native_models import native
from support.models.teacher_forcing import logits_of

from appliance.errors import UnsupportedModelError
from appliance.kernels.backend import CPU, REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model, read_settings
from appliance.model.spec import AttentionSpec, ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.kernels.operations import Backend


@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", MAKERS)
def test_a_makers_folder_answers_as_its_relative(
    case: str,
    backend: Backend,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    maker = MAKERS[case]
    model = make_model(maker.relative, **maker.settings)
    source = open_model(save_as_maker(case, model, tmp_path))
    decoder = load_decoder(source, backend, torch.device("cpu"), torch.float32)
    if maker.head is not None:
        model.lm_head.weight.data = maker.head(model.lm_head.weight.data)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    # A head of unit lengths gives small logits.
    size = float(expected.std()) if maker.head is not None else 1.0
    assert expected.std() > 0.5 * size > 0.001
    found = logits_of(decoder, token_ids) / size
    torch.testing.assert_close(found, expected / size, atol=1e-4, rtol=0)


def test_the_library_divides_by_the_lengths_of_a_head_too(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    maker = MAKERS["bailing"]
    assert maker.head is not None
    model = make_model(maker.relative, **maker.settings, hidden_size=64, num_attention_heads=4)
    save_as_maker("bailing", model, tmp_path)
    model.lm_head.weight.data = maker.head(model.lm_head.weight.data)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(native(tmp_path), token_ids)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-4, rtol=0)


def test_what_ling_leaves_out_is_as_its_published_class_has_it(tmp_path: Path) -> None:
    """As BailingMoeConfig has it: inclusionAI/Ling, models/configuration_bailing_moe.py."""
    given = {"num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 64}
    kind = {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}
    config = {**kind, **given, "use_bias": False}  # the class's default is true, which is refused
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_settings(tmp_path)
    assert found is not None
    spec, experts = found.spec, found.spec.layers[0].mlp
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers)) == (30592, 1024, 24)
    assert (spec.context_length, spec.tied_head, spec.head_norm) == (16384, False, None)
    attention = spec.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    assert (attention.num_heads, attention.head_dim) == (16, 64)
    assert attention.rope.theta == 10000.0
    assert isinstance(experts, ExpertsSpec)
    router = experts.router
    assert (router.num_experts, router.top_k, router.renormalize) == (16, 2, True)
    assert experts.shared is None
    del config["use_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="use_bias = True"):
        read_settings(tmp_path)
