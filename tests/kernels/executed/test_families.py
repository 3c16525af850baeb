from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.causal_models import random_model, spread_weights
from support.models.family_settings import OF_FAMILY, SIZES
from support.models.teacher_forcing import logits_of
from transformers import CONFIG_MAPPING

from appliance.kernels.backend import REFERENCE, select_backend
from appliance.model.families.registry import FAMILIES
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

# Families that transformers has no class for have the arithmetic of others.
MODEL_TYPES = {family.model_type for family in FAMILIES}.intersection(CONFIG_MAPPING.keys())
OWN_HEADS = {"falcon"}  # their size follows from the width
TOKEN_IDS = torch.randint(3, 40, (24,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_each_family_says_on_the_kernels_what_it_says_on_the_reference(
    model_type: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"pad_token_id": 0} | OF_FAMILY[model_type][0]
    if model_type in OWN_HEADS:
        del sizes["head_dim"]
    model = random_model(model_type, **sizes)
    spread_weights(model)
    model.save_pretrained(tmp_path)
    kernels, exact = (
        load_decoder(open_model(tmp_path), backend, torch.device("cpu"), torch.float32)
        for backend in (select_backend(torch.device("cuda")), REFERENCE)
    )
    expected = logits_of(exact, TOKEN_IDS)
    assert expected.std() > 0.3
    found = logits_of(kernels, TOKEN_IDS, chunks=[17, 1, 5, 1])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
