"""What we write is what the compressed-tensors package reads, bit for bit, and what we read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.checkpoint import SafetensorsFolder, write_safetensors
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.quant.formats import open_weights
from appliance.quant.formats.compressed_tensors import (
    decode,
    decode_fp8,
    encode,
    encoded_layout,
)
from appliance.quant.formats.compressed_tensors_config import (
    declared_weights,
    quantization_config,
)
from appliance.quant.formats.pack import pack_codes
from appliance.quant.formats.scheme import Fp8Scheme, LinearScheme, WeightScheme
from appliance.quant.methods import fp8

if TYPE_CHECKING:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

NAME = "model.layers.0.mlp.up_proj.weight"
MODULE = NAME.removesuffix(".weight")
SCHEMES = [
    WeightScheme(bits, group_size, symmetric)
    for bits, group_size, symmetric in product((3, 4, 8), (32, 64, 128, None), (True, False))
]
schemes = st.sampled_from(SCHEMES)
scale_dtypes = st.sampled_from([torch.bfloat16, torch.float16])


@pytest.fixture(scope="module", autouse=True)
def _other_package_is_imported() -> None:
    """Seconds of work, for the one process that comes to this file."""
    global BaseCompressor, QuantizationConfig
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig


def random_weight(
    scheme: WeightScheme, out_features: int, in_features: int, scale_dtype: torch.dtype, seed: int
) -> PackedWeight:
    """Any codes with any scales, also such that no quantizer would choose."""
    generator = torch.Generator().manual_seed(seed)
    group_size = scheme.group_size or in_features
    groups = (out_features, in_features // group_size)
    shape = (out_features, in_features)
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator, dtype=torch.uint8)
    scale = torch.randn(groups, generator=generator).to(scale_dtype)
    zero_points = torch.randint(0, scheme.max_code + 1, groups, generator=generator)
    return PackedWeight(
        codes=pack_codes(codes, scheme.code_bits),
        scale=scale,
        offset=-scheme.zero_code * scale if scheme.symmetric else zero_points.to(scale_dtype),
        offset_kind=OffsetKind.ADDITIVE if scheme.symmetric else OffsetKind.ZERO_POINT,
        bits=scheme.code_bits,
        group_size=group_size,
    )


def assert_same(left: PackedWeight, right: PackedWeight) -> None:
    assert (left.bits, left.group_size, left.offset_kind) == (
        right.bits,
        right.group_size,
        right.offset_kind,
    )
    for part in ("codes", "scale", "offset"):
        one, other = getattr(left, part), getattr(right, part)
        assert one.dtype == other.dtype, part
        assert torch.equal(one, other), part


weights = st.tuples(
    schemes, st.integers(1, 19), st.sampled_from([128, 256]), scale_dtypes, st.integers(0, 10**6)
).map(lambda drawn: (drawn[0], random_weight(*drawn)))


@given(weights)
@settings(derandomize=True)
def test_round_trip(drawn: tuple[WeightScheme, PackedWeight]) -> None:
    scheme, weight = drawn
    assert_same(decode(NAME, weight.shape, encode(NAME, weight, scheme), [scheme]), weight)


@given(weights)
@settings(derandomize=True)
def test_the_compressed_tensors_package_reads_the_same_values(
    drawn: tuple[WeightScheme, PackedWeight],
) -> None:
    scheme, weight = drawn
    config = QuantizationConfig.model_validate(quantization_config({MODULE: scheme}, ["lm_head"]))
    local = {
        key.replace(MODULE + ".", ""): tensor
        for key, tensor in encode(NAME, weight, scheme).items()
    }
    read = BaseCompressor.get_value_from_registry(config.format).decompress(
        local, config.config_groups["group_0"]
    )["weight"]
    assert read.dtype == weight.scale.dtype
    assert torch.equal(read, weight.dequantize(weight.scale.dtype))


@given(weights)
@settings(derandomize=True)
def test_the_layout_is_known_beforehand(drawn: tuple[WeightScheme, PackedWeight]) -> None:
    scheme, weight = drawn
    found = {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in encode(NAME, weight, scheme).items()
    }
    assert found == encoded_layout(NAME, weight.shape, scheme, dtype_name(weight.scale.dtype))


@given(st.lists(schemes, min_size=1, max_size=4, unique=True))
@settings(derandomize=True)
def test_the_config_says_which_schemes_there_are(used: list[WeightScheme]) -> None:
    config = quantization_config({f"m{i}": scheme for i, scheme in enumerate(used)}, ["lm_head"])
    assert declared_weights(config).schemes == tuple(used)
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.quantization_status == "compressed"
    assert parsed.ignore == ["lm_head"]
    for scheme, group in zip(used, parsed.config_groups.values(), strict=True):
        assert group.weights.num_bits == scheme.bits
        assert group.weights.group_size == scheme.group_size
        assert group.weights.symmetric == scheme.symmetric


def test_one_scheme_targets_all_linears_and_several_name_their_modules() -> None:
    small, large = WeightScheme(4, 32), WeightScheme(4, 64)
    one = quantization_config({"a": small, "b": small}, [])
    assert [group["targets"] for group in one["config_groups"].values()] == [["Linear"]]
    two = quantization_config({"a": small, "b": large, "c": small}, [])
    assert [g["targets"] for g in two["config_groups"].values()] == [["a", "c"], ["b"]]


SCHEME = WeightScheme(4, 32, symmetric=False)
DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a wrong width": lambda t: t | {NAME + "_packed": t[NAME + "_packed"][:, :-1]},
    "a wrong type": lambda t: t | {NAME + "_packed": t[NAME + "_packed"].long()},
    "too few scales": lambda t: t | {NAME + "_scale": t[NAME + "_scale"][:, :1]},
    "integer scales": lambda t: t | {NAME + "_scale": t[NAME + "_scale"].int()},
    "no zero points": lambda t: {k: v for k, v in t.items() if not k.endswith("zero_point")},
    "NaN": lambda t: t | {NAME + "_scale": t[NAME + "_scale"] * torch.nan},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_refused_by_name(damage: str) -> None:
    weight = random_weight(SCHEME, 8, 64, torch.bfloat16, 0)
    damaged = DAMAGES[damage](encode(NAME, weight, SCHEME))
    with pytest.raises(CheckpointError, match=NAME):
        decode(NAME, weight.shape, damaged, [SCHEME])


def change(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split("/")
    inner = config
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return config


W = "config_groups/group_0/weights"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "marlin-24", "marlin-24"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparse-24-bitmask"),
        ("config_groups/group_0/format", "mxfp8-quantized", "mxfp8"),
        ("config_groups", {}, "config_groups"),
        ("config_groups/group_0", ["Linear"], "without weights"),
        ("config_groups/group_0/output_activations", {"num_bits": 8}, "output_activations"),
        ("config_groups/group_0/input_activations", "int8", "input_activations"),
        (f"{W}/type", "float", "float"),
        (f"{W}/num_bits", 9, "9 bits"),
        (f"{W}/group_size", 48, "48"),
        (f"{W}/strategy", "block", "block"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(path: str, value: object, named: str) -> None:
    config = change(quantization_config({MODULE: SCHEME}, []), path, value)
    with pytest.raises(UnsupportedModelError, match="supported are compressed") as caught:
        declared_weights(config)
    assert named in str(caught.value)


def test_a_missing_strategy_follows_from_the_group_size() -> None:
    config = change(quantization_config({MODULE: SCHEME}, []), f"{W}/strategy", None)
    assert declared_weights(config).schemes == (SCHEME,)
    config = change(config, f"{W}/group_size", -1)
    assert declared_weights(config).schemes == (WeightScheme(4, None, symmetric=False),)


@pytest.mark.parametrize("symmetric", [True, False])
def test_listed_groups_are_those_of_their_inputs(tmp_path: Path, symmetric: bool) -> None:
    scheme = WeightScheme(4, 32, symmetric=symmetric)
    weight = random_weight(scheme, 8, 96, torch.bfloat16, 0)
    g_idx = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    config = quantization_config({MODULE: scheme}, [])
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = encode(NAME, weight, scheme) | {NAME + "_g_idx": g_idx.int()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    reader = open_weights(SafetensorsFolder(tmp_path))
    assert reader.tensor_names() == [NAME]
    loaded = reader.load(NAME)
    assert isinstance(loaded, PackedWeight)
    codes, dense = weight.unpack().double(), loaded.dequantize(torch.float64)
    for column, group in enumerate(g_idx.tolist()):
        scale, offset = (t[:, group].double() for t in (weight.scale, weight.offset))
        plus = codes[:, column] * scale + offset
        minus = (codes[:, column] - offset) * scale
        assert torch.equal(dense[:, column], plus if symmetric else minus)


FP8_SCHEMES = [Fp8Scheme(), Fp8Scheme(blockwise=True)]


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=str)
def test_fp8_is_read_by_the_package_and_by_us_as_it_was_made(scheme: Fp8Scheme) -> None:
    dense = torch.randn(256, 384, generator=torch.Generator().manual_seed(3))
    weight = fp8.quantize(dense, scheme)
    stored = encode(NAME, weight, scheme)
    found = {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored.items()
    }
    assert found == encoded_layout(NAME, weight.shape, scheme, "bfloat16")
    config = quantization_config({MODULE: scheme}, ["lm_head"])
    assert declared_weights(config).schemes == (scheme,)
    parsed = QuantizationConfig.model_validate(config)
    local = {key.replace(MODULE + ".", ""): tensor for key, tensor in stored.items()}
    read = BaseCompressor.get_value_from_registry(parsed.format).decompress(
        local, parsed.config_groups["group_0"]
    )["weight"]
    assert torch.equal(read.float(), weight.dequantize().to(read.dtype).float())
    ours = decode_fp8(NAME, stored[NAME], stored[NAME + "_scale"], [scheme])
    assert torch.equal(ours.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(ours.scale, weight.scale)


def test_fp8_groups_say_that_activations_are_scaled_as_they_come() -> None:
    for scheme, strategy in zip(FP8_SCHEMES, ("token", "group"), strict=True):
        config = quantization_config({MODULE: scheme}, [])
        inputs = config["config_groups"]["group_0"]["input_activations"]
        assert (inputs["strategy"], inputs["dynamic"]) == (strategy, True)


def test_formats_may_be_mixed() -> None:
    schemes: dict[str, LinearScheme] = {"a": WeightScheme(3, 64), "b": Fp8Scheme()}
    config = quantization_config(schemes, [])
    assert config["format"] == "mixed-precision"
    assert QuantizationConfig.model_validate(config).config_groups.keys() == {"group_0", "group_1"}
    assert declared_weights(config).schemes == tuple(schemes.values())


def test_one_scale_of_a_whole_fp8_weight_belongs_to_every_output() -> None:
    codes = torch.randn(4, 8).to(torch.float8_e4m3fn)
    weight = decode_fp8(NAME, codes, torch.tensor([0.5]), [Fp8Scheme()])
    assert torch.equal(weight.dequantize(), codes.float() * 0.5)


@pytest.mark.parametrize(
    ("codes", "scale", "said"),
    [
        (torch.zeros(4, 8), torch.ones(4, 1), "not the float-quantized form"),
        (torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.ones(3, 1), "does not belong"),
        (torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.full((4, 1), torch.nan), "NaN"),
        (torch.full((4, 8), torch.nan).to(torch.float8_e4m3fn), torch.ones(4, 1), "holds NaN"),
    ],
)
def test_damaged_fp8_is_refused_by_name(codes: Tensor, scale: Tensor, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        decode_fp8(NAME, codes, scale, [Fp8Scheme()])
    assert NAME in str(caught.value)
