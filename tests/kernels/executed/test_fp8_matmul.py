from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.fp8_matmul import launch, reference
from appliance.kernels.fp8_matmul.launch import ActivationKind, prepare_linear, quantize_rows
from appliance.kernels.fp8_matmul.timed_linear import TimedFp8Linear
from appliance.kernels.gpu.timed import TimedChoices
from appliance.kernels.packed_matmul.launch import TiledLinear
from appliance.kernels.weights.fp8 import Fp8Weight
from tests.kernels.executed.multiplying import BF16, FP16, ROUNDING, activations

SAME, FP8 = ActivationKind


def random_fp8(out_features: int, in_features: int, *, blockwise: bool) -> Fp8Weight:
    """Every finite code, subnormals included."""
    random = torch.Generator().manual_seed(out_features + in_features)
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    index = torch.randint(0, len(finite), (out_features, in_features), generator=random)
    shape = (-(-out_features // 128), -(-in_features // 128)) if blockwise else (out_features,)
    scale = (torch.rand(shape, generator=random) + 0.5) / 448
    return Fp8Weight(finite[index].view(torch.float8_e4m3fn), scale)


def assert_near(found: torch.Tensor, expected: torch.Tensor, total: torch.Tensor) -> None:
    bound = ROUNDING[found.dtype] * expected.abs() + 1e-5 * total + 1e-6
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("blockwise", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 9, 20, 64])
def test_activations_as_they_come(blockwise: bool, dtype: torch.dtype, rows: int) -> None:
    weight, bias = random_fp8(200, 512, blockwise=blockwise), torch.randn(200)
    linear = prepare_linear(weight, bias, dtype)
    assert isinstance(linear, TiledLinear)
    x, w = activations(rows, 512, dtype), weight.dequantize(torch.float64)
    expected = x.double() @ w.t() + bias.double()
    assert_near(linear(x), expected, x.double().abs() @ w.t().abs())


@pytest.mark.least_capability(89)
@pytest.mark.parametrize("blockwise", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize(("rows", "splits"), [(1, 2), (16, 1), (50, 3), (80, 1)])
def test_activations_in_fp8(
    monkeypatch: pytest.MonkeyPatch, blockwise: bool, rows: int, splits: int
) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    weight, bias = random_fp8(200, 512, blockwise=blockwise), torch.randn(200)
    x = activations(rows, 512, BF16)
    linear = prepare_linear(weight, bias, BF16, FP8)
    codes, scales = reference.quantize_rows(x)
    rounded, w = codes.double() * scales.double()[:, None], weight.dequantize(torch.float64)
    expected = rounded @ w.t() + bias.double()
    assert isinstance(linear, launch.Fp8Linear)
    found = linear(x)
    assert_near(found, expected, rounded.abs() @ w.t().abs())
    assert torch.equal(found, linear(x))


@pytest.mark.least_capability(89)
@pytest.mark.parametrize("blockwise", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize("rows", [16, 64])
def test_each_timed_tile_and_split_computes_the_same(blockwise: bool, rows: int) -> None:
    weight = random_fp8(200, 1024, blockwise=blockwise)
    linear = prepare_linear(weight, None, BF16, FP8)
    assert isinstance(linear, launch.Fp8Linear)
    work, x = TimedFp8Linear(linear), activations(rows, 1024, BF16)
    codes, scales = reference.quantize_rows(x)
    given, w = codes.double() * scales.double()[:, None], weight.dequantize(torch.float64)
    for choice in work.candidates(rows):
        work.use(TimedChoices({rows: choice}))
        assert_near(linear(x), given @ w.t(), given.abs() @ w.t().abs())
        for split in work.candidates(rows, choice):
            work.use(TimedChoices({rows: split}))
            assert_near(linear(x), given @ w.t(), given.abs() @ w.t().abs())


@pytest.mark.least_capability(89)
@pytest.mark.parametrize("has_library", [True, False])
def test_many_rows_are_left_to_the_library_where_it_multiplies_them(
    monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    shapes = []
    multiply = torch._scaled_mm

    def noted(codes: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not has_library:
            raise RuntimeError("not on this GPU")
        shapes.append(tuple(codes.shape))
        return multiply(codes, *args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    launch.library_multiplies.cache_clear()
    weight = random_fp8(208, 512, blockwise=False)
    bias = torch.randn(208).bfloat16().float()
    linear = prepare_linear(weight, bias, BF16, FP8)
    w = weight.dequantize(torch.float64)
    for rows in (64, 65, 130):
        x = activations(rows, 512, BF16)
        codes, scales = reference.quantize_rows(x)
        rounded = codes.double() * scales.double()[:, None]
        found = linear(x)
        assert_near(found, rounded @ w.t() + bias.double(), rounded.abs() @ w.t().abs())
    tried, *others = shapes or [(65, 0)]
    assert tried[0] > launch.MOST_OWN_ROWS  # so few never reach the library
    assert others == ([(65, 512), (130, 512)] if has_library else [])
    launch.library_multiplies.cache_clear()


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "NaN": lambda found: torch.full_like(found, torch.nan),
    "without the outputs' scales": lambda found: found[:, :1].expand_as(found),
    "rows in another order": lambda found: found.flip(0),
    "one number wrong": lambda found: found.index_put(
        (torch.tensor(3), torch.tensor(5)), found[3, 5] * 1.1 + 1
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_library_that_fails_without_an_error_multiplies_nothing(
    monkeypatch: pytest.MonkeyPatch, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    multiply = torch._scaled_mm

    def multiply_wrongly(*args: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = multiply(*args, **options)
        return WRONG[wrong](found)

    cpu = torch.device("cpu")
    launch.library_multiplies.cache_clear()
    assert launch.library_multiplies(cpu)
    launch.library_multiplies.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", multiply_wrongly)
    assert not launch.library_multiplies(cpu)
    assert "torch's are wrong" in caplog.text
    launch.library_multiplies.cache_clear()


@pytest.mark.least_capability(89)
@pytest.mark.parametrize(
    ("out_features", "blockwise", "dtype"),
    [(200, False, BF16), (208, True, BF16), (208, False, FP16)],
)
def test_what_the_library_lacks_stays_with_the_kernel(
    monkeypatch: pytest.MonkeyPatch, out_features: int, blockwise: bool, dtype: torch.dtype
) -> None:
    weight = random_fp8(out_features, 512, blockwise=blockwise)
    linear = prepare_linear(weight, None, dtype, FP8)
    monkeypatch.delattr(torch, "_scaled_mm")
    x = activations(80, 512, dtype)
    codes, scales = reference.quantize_rows(x)
    rounded, w = codes.double() * scales.double()[:, None], weight.dequantize(torch.float64)
    assert_near(linear(x), rounded @ w.t(), rounded.abs() @ w.t().abs())


@pytest.mark.parametrize(
    "activation",
    [ActivationKind.SAME, pytest.param(FP8, marks=pytest.mark.least_capability(89))],
)
@pytest.mark.parametrize("in_features", [96, 576])
def test_ragged_widths(activation: ActivationKind, in_features: int) -> None:
    weight = random_fp8(65, in_features, blockwise=False)
    x = activations(5, in_features, BF16)
    rounded = x.double()
    if activation is FP8:
        codes, scales = reference.quantize_rows(x)
        rounded = codes.double() * scales.double()[:, None]
    w = weight.dequantize(torch.float64)
    found = prepare_linear(weight, None, BF16, activation)(x)
    assert_near(found, rounded @ w.t(), rounded.abs() @ w.t().abs())


def test_quantized_rows_bit_for_bit() -> None:
    x = torch.cat([
        activations(4, 2080, BF16).float() * torch.tensor([[1e-4], [1.0], [300.0], [0.0]]),
        # Every value of e4m3 and all halves between, in a row whose scale is 1.
        torch.linspace(-448, 448, 2080)[None],
        (torch.arange(2080) % 64 / 1024)[None].clamp(max=0.05),
    ]).to(FP16)  # fmt: skip
    x[5, 0] = 448
    codes, scales = quantize_rows(x)
    expected, expected_scales = reference.quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected.view(torch.uint8))


def test_what_no_kernel_covers_is_refused() -> None:
    weight = random_fp8(16, 160, blockwise=True)
    with pytest.raises(UnsupportedModelError, match=r"160 inputs in blocks.*multiples of 128"):
        prepare_linear(weight, None, BF16)
    with pytest.raises(UnsupportedModelError, match="48 inputs"):
        prepare_linear(random_fp8(16, 48, blockwise=False), None, BF16)
    codes = weight.codes.view(torch.uint8).clone()
    codes[3, 4] = 0xFF
    poisoned = Fp8Weight(codes.view(torch.float8_e4m3fn)[:, :128], weight.scale[:, :1])
    with pytest.raises(UnsupportedModelError, match="NaN"):
        prepare_linear(poisoned, None, BF16)
