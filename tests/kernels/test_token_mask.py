from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.cpu.library import load_library
from appliance.kernels.operations import MaskTokens
from appliance.kernels.token_mask.cpu import NativeMasks
from appliance.kernels.token_mask.reference import mask_tokens as reference

each_way = pytest.mark.parametrize(
    "mask_tokens", [reference, NativeMasks(load_library())], ids=["reference", "cpu"]
)


def words_of(allowed: list[set[int]], vocab_size: int, spare: int) -> torch.Tensor:
    words = torch.zeros(len(allowed), -(-vocab_size // 32) + spare, dtype=torch.int64)
    for mask, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= 1 << token % 32
    return torch.where(words >= 2**31, words - 2**32, words).int()


@each_way
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), vocab_size=st.integers(1, 200), spare=st.integers(0, 3))
def test_tokens_without_a_bit_are_banned_and_nothing_else_changes(
    mask_tokens: MaskTokens, data: st.DataObject, vocab_size: int, spare: int
) -> None:
    rows = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=4))
    tokens = st.sets(st.integers(0, vocab_size - 1))
    allowed = [data.draw(tokens) for _ in rows]
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    expected = logits.clone()
    for row, kept in zip(rows, allowed, strict=True):
        for token in set(range(vocab_size)) - kept:
            expected[row, token] = -torch.inf
    where = torch.tensor(rows, dtype=torch.int64)
    mask_tokens(logits, where, words_of(allowed, vocab_size, spare))
    assert torch.equal(logits, expected)


@each_way
def test_broken_logits_stay_where_they_are_allowed(mask_tokens: MaskTokens) -> None:
    logits = torch.tensor([[torch.nan, torch.inf, torch.nan, torch.inf, 1.0]])
    mask_tokens(logits, torch.tensor([0]), words_of([{0, 3}], 5, 0))
    assert logits[0].isnan().tolist() == [True, False, False, False, False]
    assert logits[0, 1:].tolist() == [-torch.inf, -torch.inf, torch.inf, -torch.inf]
