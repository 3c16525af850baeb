"""Folders as other programs write them: we read what their formulas give.

Each form is written here in NumPy, by the facts of its format. The dense weight for comparison
never comes from our code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model_files.checkpoint import SafetensorsFolder, write_safetensors
from appliance.quant.formats import open_weights

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
ROWS, INPUTS = 64, 128
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Folder:
    """Tensors by suffix of the module, the weight that they stand for, and the settings."""

    parts: dict[str, Any]
    weight: NDArray[np.float64]
    settings: dict[str, Any]
    place: str = "config.json"

    def write(self, path: Path) -> None:
        config: dict[str, Any] = {"model_type": "llama"}
        if self.place.endswith(".json") and self.place != "config.json":
            (path / self.place).write_text(json.dumps(self.settings))
        else:
            key = "quantization_config" if self.place == "config.json" else self.place
            config[key] = self.settings
        (path / "config.json").write_text(json.dumps(config))
        named = {f"{MODULE}{key}": torch.as_tensor(part) for key, part in self.parts.items()}
        write_safetensors(path / "model.safetensors", named)


def end_to_end(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Put codes (rows, columns) into 32-bit words along the columns, the first in the lowest bits.

    Bits follow one another, on which GPTQModel, AutoRound and compressed-tensors agree.
    """
    stream = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).reshape(len(codes), -1, 32)
    words = (stream << np.arange(32, dtype=np.uint64)).sum(-1)
    found: NDArray[np.int32] = words.astype(np.uint32).view(np.int32)
    return found


def integers(bits: int, group_size: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return codes, zero points and scales, half of these negative, for every group."""
    groups = INPUTS // group_size
    codes = RANDOM.integers(0, 1 << bits, (ROWS, INPUTS))
    zeros = RANDOM.integers(1, 1 << bits, (ROWS, groups))
    scale = (RANDOM.normal(0, 0.05, (ROWS, groups))).astype(np.float16)
    return codes, zeros, scale


def of_groups(
    codes: NDArray[Any], zeros: NDArray[Any], scale: NDArray[Any], group: NDArray[Any]
) -> NDArray[np.float64]:
    """Return (q - zero point) * scale, given the group of each input."""
    shifted = codes.astype(np.float64) - zeros.astype(np.float64)[:, group]
    return shifted * scale.astype(np.float64)[:, group]


def gptq(
    bits: int,
    settings: dict[str, Any],
    *,
    stored_minus: int = 1,
    group_size: int = 32,
    act_order: bool = False,
    extra: dict[str, Any] | None = None,
    place: str = "config.json",
    symmetric: bool = False,
) -> Folder:
    codes, zeros, scale = integers(bits, group_size)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    group = np.arange(INPUTS) // group_size
    group = RANDOM.permutation(group) if act_order else group
    parts: dict[str, Any] = {
        ".qweight": end_to_end(codes, bits).T.copy(),
        ".qzeros": end_to_end(zeros.T - stored_minus, bits),
        ".scales": scale.T.copy(),
        ".g_idx": group.astype(np.int32),
    } | (extra or {})
    parts = {key: part for key, part in parts.items() if part is not None}
    weight = of_groups(codes, zeros, scale, group)
    common = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    return Folder(parts, weight, common | settings, place)


def bare(settings: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": None} | settings


AUTO = {"quant_method": "auto-round", "sym": True, "autoround_version": "0.13.0"}
DYNAMIC = {
    "bits": 4,
    "group_size": 64,
    "dynamic": {"-:.*lm_head": {}, "+:.*up_proj": {"bits": 8, "group_size": 32}},
}
EXTRA = {"bits": 4, "group_size": 64, "extra_config": {".*up_proj": {"bits": 2, "group_size": 32}}}
GPTQ: dict[str, Callable[[], Folder]] = {
    "2 bits": lambda: gptq(2, {"checkpoint_format": None, "desc_act": False}),
    "3 bits": lambda: gptq(3, {}),
    "4 bits": lambda: gptq(4, {"sym": False, "static_groups": False, "damp_percent": 0.01}),
    "8 bits": lambda: gptq(8, {"lm_head": False, "true_sequential": True}),
    "3 bits of version 2": lambda: gptq(3, {"checkpoint_format": "gptq_v2"}, stored_minus=0),
    "int64 groups": lambda: gptq(4, {}, extra={".g_idx": np.arange(INPUTS) // 32}),
    "shifts beside": lambda: gptq(4, {}, extra={".wf": np.arange(0, 32, 4, dtype=np.int32)[None]}),
    "3 bits in act-order": lambda: gptq(3, {"desc_act": True}, act_order=True),
    "a row each": lambda: gptq(4, {"group_size": -1}, group_size=INPUTS),
    "rules by module": lambda: gptq(8, DYNAMIC),
    "a file of its own": lambda: gptq(4, bare({"bits": 4}), place="quantize_config.json"),
    "auto-round": lambda: gptq(
        4, AUTO | {"packing_format": "auto_round:auto_gptq"}, symmetric=True
    ),
    "auto_round": lambda: gptq(
        4, AUTO | {"quant_method": "auto_round", "packing_format": "auto_round"}, stored_minus=0
    ),
    "auto-round of gptqmodel": lambda: gptq(
        2, AUTO | {"packing_format": "auto_round:gptqmodel"}, stored_minus=0
    ),
    "auto-round of 2024": lambda: gptq(
        4,
        {"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"},
        stored_minus=0,
        extra={".g_idx": None},
    ),
    "auto-round by module": lambda: gptq(2, AUTO | EXTRA | {"packing_format": "auto_round:gptq"}),
    "auto-round of 5 bits": lambda: gptq(5, AUTO | {"packing_format": "auto_round:auto_gptq"}),
}


def awq(version: str, settings: dict[str, Any], place: str = "config.json") -> Folder:
    codes, zeros, scale = integers(4, 64)
    group = np.arange(INPUTS) // 64
    weight = of_groups(codes, zeros, scale, group)
    nibbles = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that each nibble of a word belongs to
    if version == "gemm":
        ordered = codes.T.reshape(INPUTS, -1, 8)[..., nibbles].reshape(INPUTS, -1)
        zeros_of = zeros.T.reshape(len(zeros.T), -1, 8)[..., nibbles].reshape(len(zeros.T), -1)
        parts = {".qweight": end_to_end(ordered, 4), ".qzeros": end_to_end(zeros_of, 4)}
        parts[".scales"] = scale.T.copy()
        return Folder(parts, weight, settings, place)
    padded = [(0, 0), (0, 16 - INPUTS // 64)]  # two words of eight groups
    if version == "gemv":
        parts = {".qweight": end_to_end(codes, 4), ".scales": np.pad(scale, padded)}
        parts[".qzeros"] = end_to_end(np.pad(zeros, padded), 4)
        return Folder(parts, weight, settings)
    scaled = (-zeros * scale.astype(np.float32)).astype(np.float16)
    exact = codes * scale[:, group].astype(np.float64) + scaled[:, group].astype(np.float64)
    # AutoAWQ's pack_intweight, one step per line.
    kernel: NDArray[Any] = codes.reshape(ROWS, -1, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    kernel = kernel.reshape(ROWS, -1, 4, 4, 2).transpose(0, 1, 2, 4, 3).reshape(ROWS, -1)
    kernel = kernel.reshape(ROWS // 4, 4, -1, 64).transpose(0, 2, 1, 3)
    kernel = kernel.reshape(ROWS // 4, -1, 64, 4)
    words = (kernel << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16).view(np.int16)
    return Folder(
        {
            ".qweight": words.reshape(ROWS // 4, -1),
            ".scales": np.pad(scale, padded).T.copy(),
            ".qzeros": np.pad(scaled, padded).T.copy(),
        },
        exact,
        settings,
    )


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
OWN_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
AWQ: dict[str, Callable[[], Folder]] = {
    "gemm": lambda: awq("gemm", AWQ_SETTINGS | {"version": "GEMM", "backend": "autoawq"}),
    "gemv": lambda: awq("gemv", AWQ_SETTINGS | {"version": "GEMV"}),
    "gemv_fast": lambda: awq("gemv_fast", AWQ_SETTINGS | {"version": "gemv_fast"}),
    "of gptqmodel": lambda: awq("gemm", AWQ_SETTINGS | {"checkpoint_format": "gemm"}),
    "awq in a file of its own": lambda: awq("gemm", OWN_AWQ, "quant_config.json"),
    "awq of auto-round": lambda: awq(
        "gemm", AUTO | {"bits": 4, "group_size": 64, "packing_format": "auto_round:auto_awq"}
    ),
}


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(settings: dict[str, Any], place: str = "config.json") -> Folder:
    """ModelOpt's: e4m3 scales of 16 inputs, times one float32."""
    codes = RANDOM.integers(0, 16, (ROWS, INPUTS))
    scale = torch.as_tensor(RANDOM.uniform(1, 400, (ROWS, INPUTS // 16))).to(torch.float8_e4m3fn)
    weight = E2M1[codes] * scale.double().numpy().repeat(16, 1) * 0.0005
    parts = {
        ".weight": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        ".weight_scale": scale,
        ".weight_scale_2": torch.tensor(0.0005),
        ".input_scale": torch.tensor(0.01),
    }
    return Folder(parts, weight, settings, place)


def fp8(
    settings: dict[str, Any], shape: tuple[int, ...], name: str, place: str = "config.json"
) -> Folder:
    codes = torch.as_tensor(RANDOM.normal(0, 50, (ROWS, INPUTS))).to(torch.float8_e4m3fn)
    scale = torch.as_tensor(RANDOM.uniform(0.001, 0.01, shape)).float()
    weight = codes.double() * scale.double().reshape(-1, 1)
    parts = {".weight": codes, name: scale, ".input_scale": torch.tensor(0.01)}
    return Folder(parts, weight.numpy(), settings, place)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """Settings in hf_quant_config.json's form."""
    own = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.45.0"}, "quantization": own | more}


FILE = "hf_quant_config.json"
LAYERS = {MODULE: {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "other": {"quant_algo": "FP8"}}
DEEPSEEK = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
MODELOPT: dict[str, Callable[[], Folder]] = {
    "modelopt FP8": lambda: fp8(modelopt("FP8"), (), ".weight_scale", FILE),
    "modelopt rows": lambda: fp8(
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"), (ROWS,), ".weight_scale", FILE
    ),
    "modelopt blocks": lambda: fp8(modelopt("FP8_PB_WO"), (1, 1, 1, 1), ".weight_scale", FILE),
    # ModelOpt 0.47's export_hf_checkpoint writes this name in small letters.
    "modelopt blocks as exported": lambda: fp8(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]},
        (1, 1, 1, 1),
        ".weight_scale",
    ),
    # From AutoRound 0.16's scheme FP8_STATIC.
    "auto-round FP8": lambda: fp8(
        {
            "quant_method": "auto-round",
            "bits": 8,
            "data_type": "fp",
            "fmt": "e4m3",
            "packing_format": "auto_round:fp8_static",
            "activation_scheme": "static",
        },
        (ROWS,),
        ".weight_scale",
    ),
    "without a method": lambda: fp8({"quant_algo": "FP8"}, (1,), ".weight_scale"),
    "modelopt NVFP4": lambda: nvfp4(modelopt("NVFP4", group_size=16), FILE),
    "mixed": lambda: nvfp4(modelopt("MIXED_PRECISION", quantized_layers=LAYERS), FILE),
    "mixed, the other": lambda: fp8(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS},
        (),
        ".weight_scale",
    ),
    "NVFP4 among FP8 blocks": lambda: nvfp4(
        DEEPSEEK | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    ),
    "fmt with fn": lambda: fp8(DEEPSEEK, (1, 1), ".weight_scale_inv"),
    "fbgemm": lambda: fp8(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (ROWS, 1), ".weight_scale"
    ),
}

NF4 = "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635"
NF4 += " -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725"
NF4 += " 0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941"
NF4 += " 0.7229568362236023 1"
FOUR = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
TABLES = {"nf4": np.array(NF4.split(), dtype=np.float32), "fp4": FOUR.astype(np.float32)}


def bnb(kind: str, *, nested: bool, settings: dict[str, Any]) -> Folder:
    """QLoRA's: blocks of 64 weights with their largest magnitude, perhaps coded in 8 bits too."""
    codes = RANDOM.integers(0, 16, ROWS * INPUTS)
    table = TABLES[kind]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32"}
    state["shape"] = [ROWS, INPUTS]
    maxima = RANDOM.uniform(0.1, 0.3, ROWS * INPUTS // 64).astype(np.float32)
    parts: dict[str, Any] = {
        ".weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        ".weight.absmax": maxima,
        ".weight.quant_map": table,
    }
    if nested:
        map = np.sort(RANDOM.uniform(-1, 1, 256)).astype(np.float32)
        coded = RANDOM.integers(0, 256, len(maxima)).astype(np.uint8)
        outer = np.array([0.1, 0.12, 0.15, 0.13], dtype=np.float32)[: -(-len(maxima) // 64)]
        state |= {"nested_blocksize": 64, "nested_offset": 0.2, "nested_dtype": "float32"}
        maxima = map[coded] * outer.repeat(64)[: len(maxima)] + np.float32(0.2)
        parts[".weight.absmax"] = coded
        parts |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": map}
    text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = text
    weight = table[codes].astype(np.float64) * maxima.astype(np.float64).repeat(64)
    return Folder(parts, weight.reshape(ROWS, INPUTS), settings)


def bnb_int8() -> Folder:
    codes = RANDOM.integers(-127, 128, (ROWS, INPUTS)).astype(np.int8)
    maxima = RANDOM.uniform(0.1, 0.3, ROWS).astype(np.float32)
    parts = {".weight": codes, ".SCB": maxima, ".weight_format": np.array(0, dtype=np.uint8)}
    weight = codes * (maxima.astype(np.float64) / 127)[:, None]
    return Folder(parts, weight, {"load_in_8bit": True, "llm_int8_threshold": 6.0})


BNB_SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BITSANDBYTES: dict[str, Callable[[], Folder]] = {
    "nf4": lambda: bnb("nf4", nested=False, settings={"load_in_4bit": True}),
    "nf4, coded twice": lambda: bnb("nf4", nested=True, settings=BNB_SETTINGS),
    "fp4": lambda: bnb("fp4", nested=False, settings=BNB_SETTINGS),
    "int8": bnb_int8,
}
FORMS = GPTQ | AWQ | MODELOPT | BITSANDBYTES


@pytest.mark.parametrize("name", FORMS)
def test_what_is_read_is_what_the_format_says(name: str, tmp_path: Path) -> None:
    made = FORMS[name]()
    made.write(tmp_path)
    for in_torch in (True, False):
        reader = open_weights(SafetensorsFolder(tmp_path, in_torch=in_torch))
        assert reader.tensor_names() == [NAME]
        assert reader.shape(NAME) == (ROWS, INPUTS)
        loaded = arrays.in_torch(reader.load(NAME))  # warns if it cannot share memory
        found = dense(loaded, "float32").double().numpy()
        largest = float(np.abs(made.weight).max())
        np.testing.assert_allclose(found, made.weight, 1e-6, 1e-6 * largest)
