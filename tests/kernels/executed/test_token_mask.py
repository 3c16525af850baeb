from __future__ import annotations

import pytest
import torch

from appliance.kernels.token_mask import reference
from appliance.kernels.token_mask.launch import mask_tokens

VOCAB = 5000  # two chunks


@pytest.mark.parametrize("rows", [[], [3], [4, 0, 2]])
@pytest.mark.parametrize("spare", [4, 11])  # words behind the last that counts
def test_logits_are_those_of_the_reference_to_the_bit(rows: list[int], spare: int) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    wide = torch.randn(5, VOCAB + 24, generator=generator)
    logits, rest = wide[:, :VOCAB], wide[:, VOCAB:].clone()  # rows of a larger tensor
    shape = (len(rows), -(-VOCAB // 32) + spare)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    expected, where = logits.clone(), torch.tensor(rows, dtype=torch.int64)
    reference.mask_tokens(expected, where, words)
    mask_tokens(logits, where, words)
    assert torch.equal(logits, expected)
    assert torch.equal(wide[:, VOCAB:], rest)
