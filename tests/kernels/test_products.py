"""Unlike and exact products replace every product that torch's path uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels import products
from support.kernels.products import exact_products, unlike_products
from torch import Tensor
from torch.nn import functional

RANDOM = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(160, 96, generator=RANDOM), torch.randn(160, generator=RANDOM)
KEYS = torch.randn(4, 50, 96, generator=RANDOM)  # (heads, keys, head_dim)
MASK = torch.zeros(40, 50).masked_fill_(torch.ones(40, 50).triu(11).bool(), -torch.inf)
ROWS = 40


def attention(x: Tensor) -> Tensor:
    # With a batch dimension, as flash attention requires: without it torch rounds float32 products
    # once.
    query, keys = x.expand(1, 4, -1, -1), KEYS[None].to(x.dtype)
    mask = MASK[: len(x)]
    return functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)


def in_place(x: Tensor) -> Tensor:
    out = BIAS.to(x.dtype).repeat(len(x), 1)
    assert out.addmm_(x, WEIGHT.to(x.dtype).t()) is out
    return out


# Functions of x (rows, 96), whose results have the rows in the last but one dimension.
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, WEIGHT.to(x.dtype)),
    "linear with a bias": lambda x: functional.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "linear of batches": lambda x: functional.linear(x[None], WEIGHT.to(x.dtype)),
    "matmul": lambda x: x @ WEIGHT.to(x.dtype).t(),
    "matmul of batches": lambda x: x @ KEYS.to(x.dtype).transpose(1, 2),
    "einsum": lambda x: torch.einsum("qd,hkd->hqk", x, KEYS.to(x.dtype)),
    "vector": lambda x: (x @ WEIGHT.to(x.dtype)[0])[:, None],
    "into out": lambda x: torch.mm(x, WEIGHT.to(x.dtype).t(), out=x.new_empty(len(x), 160)),
    "in place": in_place,
    "attention": attention,
}


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def x(request: pytest.FixtureRequest) -> Tensor:
    rows = torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(1))
    return rows.to(request.param)


@pytest.fixture(params=PRODUCTS)
def product(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    return PRODUCTS[request.param]


def parts(product: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The first rows of the product of all rows, and the product of these rows alone."""
    whole = product(x)
    return [(whole[..., :rows, :], product(x[:rows])) for rows in (1, 2, 3, 7, 16, 33)]


@pytest.mark.usefixtures("unlike_products")
def test_a_row_beside_other_rows_has_other_last_bits_and_no_other_value(
    product: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    found = parts(product, x)
    assert any(not torch.equal(together, alone) for together, alone in found)
    eps = torch.finfo(x.dtype).eps
    for together, alone in found:
        torch.testing.assert_close(together, alone, rtol=4 * eps, atol=64 * eps)
        assert torch.equal(product(x[: together.shape[-2]]), alone), "the same shapes and places"


@pytest.mark.usefixtures("unlike_products", "exact_products")
def test_exact_products_hide_it(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for together, alone in parts(product, x):
        assert together.dtype == alone.dtype == x.dtype
        assert torch.equal(together, alone)


@pytest.mark.usefixtures("exact_products")
def test_a_large_matrix_is_widened_in_parts(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    whole = PRODUCTS["matmul"](x), PRODUCTS["into out"](x)
    monkeypatch.setattr(products, "WIDE_AT_ONCE", 96 * 9)
    assert torch.equal(PRODUCTS["matmul"](x), whole[0])
    assert torch.equal(PRODUCTS["into out"](x), whole[1])


def test_afterwards_torch_is_as_before(x: Tensor) -> None:
    product = PRODUCTS["linear"]
    before = product(x)
    for other in (unlike_products, exact_products):
        with other():
            product(x)
        assert torch.equal(product(x), before)
