from __future__ import annotations

import pytest
import torch
from support.kernels.fp4_weights import random_fp4

from appliance.kernels.weights.fp4 import GROUPS, Fp4Weight

FORMS = tuple(getattr(torch, name) for name in GROUPS)


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_stacks(form: torch.dtype) -> None:
    weight = random_fp4(9, 64, form)
    dense = weight.dequantize()
    assert torch.equal(weight.rows(slice(2, 5)).dequantize(), dense[2:5])
    assert torch.equal(weight.rows(torch.tensor([7, 0])).dequantize(), dense[[7, 0]])
    both = Fp4Weight.concatenate([weight.rows(slice(0, 4)), weight.rows(slice(4, 9))])
    assert torch.equal(both.dequantize(), dense)
    assert both.stacks_with(weight)
    assert not weight.stacks_with(random_fp4(9, 64, FORMS[1 - FORMS.index(form)]))


def test_what_is_not_finite_is_seen() -> None:
    weight = random_fp4(3, 64, torch.float8_e8m0fnu)
    assert weight.is_finite()
    weight.scale.view(torch.uint8)[1, 1] = 255
    assert not weight.is_finite()
