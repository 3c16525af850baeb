"""Prefill over FP8 blocks where tensor cores multiply E4M3: what rounding costs, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from appliance.kernels.attention import reference
from appliance.kernels.cache.kv_format import KVFormat
from tests.kernels.executed.attending import BF16, attend

if TYPE_CHECKING:
    from torch import Tensor

    from tests.kernels.executed.conftest import Case, MakeCase

pytestmark = [pytest.mark.compiled, pytest.mark.least_capability(89)]
CHUNKS = (20, 67), (20, 130)  # rows and contexts: a whole prompt, and the rest of one


def attended(case: Case, options: dict[str, Any]) -> Tensor:
    query = case.query.double()
    return reference.paged_attention(query, case.cache, case.batch, **options)


def size(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_rounds_little(
    make_case: MakeCase, shape: dict[str, Any], query_size: float = 1.0, **options: Any
) -> None:
    """Queries and weights lose at most what the blocks' keys and values have lost before.

    They are rounded to as many bits, so that is the bound; both are a few hundredths of a result.
    """
    shape = {"dtype": BF16, **shape}
    options = {"scale": shape["head_dim"] ** -0.5 / query_size, **options}
    case = make_case(*CHUNKS, kv_format=KVFormat.FP8, **shape)
    whole = make_case(*CHUNKS, kv_format=KVFormat.FP32, **shape)
    case.query.mul_(query_size)
    whole.query.mul_(query_size)
    rounded, exact = attended(case, options), attended(whole, options)
    lost = size(attend(case, **options) - rounded)
    assert 0.002 * size(exact) < lost < size(rounded - exact) < 0.06 * size(exact)


def test_queries_and_weights_lose_no_more_than_keys_and_values(make_case: MakeCase) -> None:
    assert_rounds_little(make_case, {"num_heads": 4, "head_dim": 128})


def test_windows_caps_and_sinks(make_case: MakeCase) -> None:
    sinks = torch.linspace(-1, 1, 6)
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80}
    assert_rounds_little(make_case, shape, window=50, softcap=20.0, sinks=sinks)


def test_wide_heads(make_case: MakeCase) -> None:
    assert_rounds_little(make_case, {"num_heads": 1, "head_dim": 256})


@pytest.mark.parametrize("query_size", [1e9])
def test_queries_of_any_size(make_case: MakeCase, query_size: float) -> None:
    assert_rounds_little(make_case, {"num_heads": 2, "head_dim": 64}, query_size)
