from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.operations import ScoreTokens
from appliance.kernels.token_scores.cpu import NativeScores
from appliance.kernels.token_scores.reference import score_tokens as reference

library = NativeScores(NativeEngine(load_library(), threads=2))
each_way = pytest.mark.parametrize("score_tokens", [reference, library], ids=["torch", "cpu"])


@each_way
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), vocab_size=st.integers(1, 3000), scale=st.sampled_from([0.0, 1.0, 300.0]))
def test_scores_are_those_of_a_softmax_in_float64(
    score_tokens: ScoreTokens, data: st.DataObject, vocab_size: int, scale: float
) -> None:
    seed = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size, generator=seed) * scale).round(decimals=1)  # with ties
    targets = torch.randint(vocab_size, (5,), generator=seed)
    count = data.draw(st.integers(0, min(vocab_size, 20)))
    before = logits.clone()
    found = score_tokens(logits, targets, count)
    assert torch.equal(logits, before)
    expected = logits.double().log_softmax(-1)
    order = sorted(range(vocab_size), key=lambda token: token)
    ranked = [sorted(order, key=lambda token: -row[token].item())[:count] for row in logits]
    assert found.top_ids.tolist() == ranked
    own = expected.gather(1, targets[:, None])[:, 0].float()
    torch.testing.assert_close(found.chosen, own, atol=1e-4, rtol=1e-6)
    best = expected.gather(1, found.top_ids).float()
    torch.testing.assert_close(found.top, best, atol=1e-4, rtol=1e-6)


@each_way
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_numbers_harms_no_other(score_tokens: ScoreTokens, value: float) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    alone = score_tokens(logits[2:].clone(), torch.tensor([5]), 2)
    logits[1, 77] = value
    found = score_tokens(logits, torch.tensor([5, 5, 5]), 2)
    assert found.chosen.isfinite().tolist() == [True, False, True]
    assert found.top_ids[2].tolist() == alone.top_ids[0].tolist()
    assert found.chosen[2] == alone.chosen[0]
