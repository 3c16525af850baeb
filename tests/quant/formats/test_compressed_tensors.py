"""The compressed-tensors package reads what we write, bit for bit, and we read what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.arrays import dtype_name
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.weight import dense
from appliance.model_files.checkpoint import SafetensorsFolder, write_safetensors
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
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, LinearScheme, WeightScheme
from appliance.quant.methods import fp4, fp8

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
    """Import the package once: it takes seconds, in the only process that runs this file."""
    global BaseCompressor, QuantizationConfig
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig


def random_weight(
    scheme: WeightScheme, out_features: int, in_features: int, scale_dtype: torch.dtype, seed: int
) -> PackedWeight:
    """Any codes with any scales, including those that no quantizer would choose."""
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


@pytest.mark.parametrize("scheme", [Fp4Scheme(has_powers=True), Fp4Scheme()], ids=str)
def test_4_bit_floats_are_read_by_the_package_and_by_us_as_they_were_made(
    folder_of: Callable[[dict[str, Tensor], object], SafetensorsFolder], scheme: Fp4Scheme
) -> None:
    dense = torch.randn(48, 128, generator=torch.Generator().manual_seed(4)) * 0.03
    hessian = torch.eye(128) + 0.3
    weight = fp4.quantize_linear(dense, hessian, scheme, torch.bfloat16)
    assert isinstance(weight, Fp4Weight)
    stored = encode(NAME, weight, scheme)
    found = {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored.items()
    }
    assert found == encoded_layout(NAME, weight.shape, scheme, "bfloat16")
    config = quantization_config({MODULE: scheme}, ["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.config_groups["group_0"].weights.scale_dtype == stored[NAME + "_scale"].dtype
    local = {key.replace(MODULE + ".", ""): tensor for key, tensor in stored.items()}
    read = BaseCompressor.get_value_from_registry(config["format"]).decompress(
        local, parsed.config_groups["group_0"]
    )["weight"]
    torch.testing.assert_close(read.double(), weight.dequantize(torch.float64), rtol=4e-3, atol=0)
    ours = open_weights(folder_of(stored, config)).load(NAME)
    assert isinstance(ours, Fp4Weight)
    assert torch.equal(ours.dequantize(), weight.dequantize())


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


# --- folders of others ---------------------------------------------------------------------------

ROWS, INPUTS = 64, 128
RANDOM = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Made:
    """A weight's parts by suffix, the weight that they stand for, and the settings."""

    parts: dict[str, Tensor]
    weight: Tensor
    settings: dict[str, Any]


def made(
    format: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None = None,
    *,
    extra: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Made:
    """Compress a weight with the package, and decompress it with the package."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    dense_weight = torch.randn(ROWS, INPUTS, generator=RANDOM) * 0.05
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    kind = BaseCompressor.get_value_from_registry(format)
    stored = kind.compress({"weight": dense_weight} | parameters(dense_weight, weights), scheme)
    expected = kind.decompress(dict(stored), scheme)["weight"]
    named = {f".{key}": part for key, part in stored.items()} | (extra or {})
    return Made(named, expected, config | settings)


def parameters(weight: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Scales and zero points from the smallest and largest weight of each group."""
    bits = arguments["num_bits"]
    size = {"tensor": None, "channel": INPUTS}.get(
        arguments["strategy"], arguments.get("group_size")
    )
    rows = weight.reshape(1, 1, -1) if size is None else weight.view(ROWS, -1, size)
    largest = rows.abs().amax(-1)
    if arguments["type"] == "float" and bits == 4:
        if arguments["strategy"] == "group":
            return {"weight_scale": 2 ** (largest / 6).log2().round()}
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        return {"weight_scale": largest / 6 * whole, "weight_global_scale": whole}
    if arguments["type"] == "float":
        return {"weight_scale": (largest / 448).reshape(-1, *[1] * (size is not None))}
    if arguments.get("symmetric", True):
        scale = largest / (2 ** (bits - 1) - 1)
        return {"weight_scale": scale if size else scale.reshape(1)}
    scale = (rows.amax(-1) - rows.amin(-1)) / (2**bits - 1)
    zero = (-(2 ** (bits - 1)) - rows.amin(-1) / scale).round()
    zero = zero.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def before_0_9(symmetric: bool) -> Made:
    """Zero points of one signed byte each, all zero in symmetric models; a shape in int32."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    packed = made("pack-quantized", ints(4, "group", 32, symmetric=symmetric))
    shape = torch.tensor([ROWS, INPUTS], dtype=torch.int32)
    zeros = torch.zeros(ROWS, INPUTS // 32, dtype=torch.int8)
    if not symmetric:
        words = packed.parts[".weight_zero_point"]
        zeros = unpack_from_int32(words, 4, zeros.shape, packed_dim=0).contiguous()
    changed = {".weight_zero_point": zeros, ".weight_shape": shape}
    return replace(packed, parts=packed.parts | changed)


def ints(bits: int, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size} | more


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INPUT_SCALE = {".input_scale": torch.tensor([0.01])}
MX = FP4 | {"strategy": "group", "group_size": 32}
ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "data_type": "nv_fp4_with_static_gs",
}
NAIVE, WHOLE = "naive-quantized", "int-quantized"
FOLDERS: dict[str, Callable[[], Made]] = {
    "frozen": lambda: made("float-quantized", FP8, quantization_status="frozen"),
    "calibration": lambda: made("float-quantized", FP8, quantization_status="calibration"),
    "static inputs": lambda: made("float-quantized", FP8, STATIC, extra=INPUT_SCALE),
    "naive FP8": lambda: made(NAIVE, FP8 | {"strategy": "channel"}),
    "W8A8": lambda: made(WHOLE, ints(8, "channel"), TOKENS),
    "W8A8 by tensor": lambda: made(WHOLE, ints(8, "tensor"), TOKENS),
    "W8A8 in groups": lambda: made(WHOLE, ints(8, "group", 32)),
    "W8A8 with zero points": lambda: made(WHOLE, ints(8, "channel", symmetric=False)),
    "naive 4 bits": lambda: made(NAIVE, ints(4, "channel")),
    "2 bits": lambda: made("pack-quantized", ints(2, "group", 32)),
    "5 bits": lambda: made("pack-quantized", ints(5, "group", 64, symmetric=False)),
    "zero points": lambda: made("pack-quantized", ints(4, "group", 32, symmetric=False)),
    "W4A8": lambda: made("pack-quantized", ints(4, "group", 128), TOKENS),
    "unpacked zero points": lambda: before_0_9(False),
    "zero points of zero": lambda: before_0_9(True),
    "sparseml": lambda: made("pack-quantized", ints(4, "group", 32), quant_method="sparseml"),
    "nvfp4": lambda: made("nvfp4-pack-quantized", FP4),
    "mxfp4": lambda: made("mxfp4-pack-quantized", MX),
    "nvfp4 of auto-round": lambda: made("nvfp4-pack-quantized", FP4, **ROUND),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_others_stand_for_what_the_package_reads(
    name: str, folder_of: Callable[[dict[str, Tensor], object], SafetensorsFolder]
) -> None:
    of = FOLDERS[name]()
    path = folder_of({MODULE + key: part for key, part in of.parts.items()}, of.settings).path
    step = 2.0**-8 if of.weight.dtype is torch.bfloat16 else 1e-6  # theirs is rounded, not ours
    for in_torch in (True, False):
        reader = open_weights(SafetensorsFolder(path, in_torch=in_torch))
        assert reader.tensor_names() == [NAME]
        assert reader.shape(NAME) == (ROWS, INPUTS)
        found = dense(arrays.in_torch(reader.load(NAME)), "float32")
        torch.testing.assert_close(found, of.weight.float(), rtol=step, atol=1e-6 * 0.2)


def test_inputs_that_stay_in_16_bits_are_said(
    folder_of: Callable[[dict[str, Tensor], object], SafetensorsFolder],
) -> None:
    for name, is_said in (("W8A8", True), ("static inputs", True), ("2 bits", False)):
        of = FOLDERS[name]()
        folder = folder_of({MODULE + key: part for key, part in of.parts.items()}, of.settings)
        assert any("stay in 16 bits" in n for n in open_weights(folder).notes()) is is_said


def test_weights_without_codes_yet_are_refused(
    folder_of: Callable[[dict[str, Tensor], object], SafetensorsFolder],
) -> None:
    of = FOLDERS["frozen"]()
    parts = {MODULE + key: part for key, part in of.parts.items()} | {NAME: of.weight.bfloat16()}
    with pytest.raises(UnsupportedModelError, match="its codes were not made yet"):
        open_weights(folder_of(parts, of.settings)).load(NAME)
