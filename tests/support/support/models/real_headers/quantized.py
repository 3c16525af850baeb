"""Quantizes a header's tensors in the form that its settings name, and gives their dense values.

Independent of the readers under test: each form follows its maker's description. Works on tensors
without content as well.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from support.models.real_headers.header import Header
from torch import Tensor

Parts = dict[str, Tensor]  # by the suffix of a module's name
Encode = Callable[[Tensor], tuple[Parts, Tensor]]

E4M3_MOST = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of all makers: the parts beside the decoder's linears.
_OTHERS = ("embed", "lm_head", "visual", "vision", "projector", "audio", "norm", "conv")


class UnknownFormError(Exception):
    """This file implements no maker's description of this form."""


def fp8_blocks(weight: Tensor, rows: int = 128, columns: int = 128) -> tuple[Parts, Tensor]:
    """DeepSeek's form: a scale for each block of 128 by 128."""
    count = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    if weight.is_meta:
        scale = torch.empty(count, device="meta")
        return {".weight": weight.to(torch.float8_e4m3fn), ".weight_scale_inv": scale}, weight
    padded = torch.zeros(count[0] * rows, count[1] * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.view(count[0], rows, count[1], columns).abs().amax((1, 3)) / E4M3_MOST
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.float() * spread


def fp8_tensor(weight: Tensor, scale_name: str, input_name: str | None) -> tuple[Parts, Tensor]:
    """One scale for a matrix, and one for its inputs."""
    scale = weight.abs().amax().float() / E4M3_MOST
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {".weight": codes, scale_name: scale}
    if input_name:
        parts[input_name] = torch.full_like(scale, 0.01)
    return parts, codes.float() * scale


def fp8_rows(weight: Tensor) -> tuple[Parts, Tensor]:
    """A scale for each row, as compressed-tensors stores it."""
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MOST).bfloat16()
    codes = (weight / scale.float()).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def _to_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and values of the nearest 4-bit numbers."""
    levels = torch.tensor(_E2M1, device=values.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(values.abs(), bounds) if not values.is_meta else values.to(torch.int64)
    near = levels[codes] * values.sign() if not values.is_meta else values
    return (codes + 8 * (values < 0)).to(torch.uint8), near


def _pairs(codes: Tensor) -> Tensor:
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def nvfp4(
    weight: Tensor, input_name: str | None = ".input_scale", *, divides: bool = False
) -> tuple[Parts, Tensor]:
    """ModelOpt's: groups of 16 with E4M3 scales, and a scale of the matrix.

    Args:
        divides: use compressed-tensors' names, whose scale of the matrix is the inverse.
    """
    whole = weight.abs().amax().float() / (6 * E4M3_MOST)
    groups = weight.reshape(weight.shape[0], -1, 16)
    scale = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    factor = (scale.float() * whole)[:, :, None]
    codes, near = _to_e2m1(groups / torch.where(factor == 0, 1.0, factor))
    dense = (near * factor).reshape(weight.shape)
    packed = _pairs(codes.reshape(weight.shape))
    if divides:
        parts = {".weight_packed": packed, ".weight_scale": scale,
                 ".weight_global_scale": 1 / whole[None]}  # fmt: skip
        return parts | ({".input_global_scale": 1 / whole[None]} if input_name else {}), dense
    parts = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole}
    if input_name:
        parts[input_name] = torch.full_like(whole, 0.01)
    return parts, dense


def mxfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    """The Open Compute Project's form of a stack (experts, inputs, outputs), as in gpt-oss."""
    turned = weight.transpose(1, 2).contiguous()
    groups = turned.reshape(*turned.shape[:2], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(3) / 6)) + 1
    factor = torch.exp2(exponent)[..., None]
    codes, near = _to_e2m1(groups / factor)
    dense = (near * factor).reshape(turned.shape).transpose(1, 2)
    return {"_blocks": _pairs(codes), "_scales": (exponent + 127).to(torch.uint8)}, dense


def _rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """Return codes (out, in), scales and zeros (out, groups) in whole numbers from 0 on."""
    columns = weight.shape[1]
    size = columns if group <= 0 else group
    groups = weight.reshape(weight.shape[0], columns // size, size)
    most = 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(2) * 2 / most).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(0, most)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, most)
    dense = ((codes - zero[..., None]) * scale[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape).to(torch.int64), scale, zero.to(torch.int64), dense


def _words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along the last dimension into words of 32 bits, the first lowest."""
    count = 32 // bits
    each = codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)
    word = torch.zeros_like(each[..., 0])
    for place, index in enumerate(order or range(count)):
        word = word | (each[..., index] << (bits * place))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def awq(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Parts, Tensor]:
    """AutoAWQ's gemm form."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, scale, zero, dense = _rounded(weight, bits, group, symmetric=symmetric)
    parts = {
        ".qweight": _words(codes.T, bits, order),
        ".qzeros": _words(zero.T, bits, order),
        ".scales": scale.T.half(),
    }
    return parts, dense


def gptq(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, ordered: bool, less: int = 1
) -> tuple[Parts, Tensor]:
    """AutoGPTQ's form; it stores zero points minus `less`."""
    codes, scale, zero, dense = _rounded(weight, bits, group, symmetric=symmetric)
    parts = {
        ".qweight": _words(codes, bits).T.contiguous(),
        ".qzeros": _words((zero.T - less) % 2**bits, bits),
        ".scales": scale.T.half(),
    }
    if ordered:
        size = weight.shape[1] if group <= 0 else group
        parts[".g_idx"] = (torch.arange(weight.shape[1], device=weight.device) // size).int()
    return parts, dense


def packed_ints(weight: Tensor, bits: int, group: int | None) -> tuple[Parts, Tensor]:
    """compressed-tensors' symmetric pack-quantized form."""
    codes, scale, _, _ = _rounded(weight, bits, group or -1, symmetric=True)
    scale = scale.bfloat16()
    spread = scale.float().repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    dense = (codes - 2 ** (bits - 1)) * spread
    shape = torch.tensor(weight.shape)
    packed = _words(codes, bits)
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_shape": shape}, dense


def whole_ints(weight: Tensor) -> tuple[Parts, Tensor]:
    """compressed-tensors' int-quantized form of eight bits, a scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which tensors a header stores in which way.

    Attributes:
        encode: returns the encoder for a tensor's name and shape; None keeps the tensor as it is.
        kv_scales: stored beside keys and values, one per tensor.
        parts_experts: whether a stack of experts is stored one by one.
    """

    encode: Callable[[str, tuple[int, ...]], Encode | None]
    kv_scales: bool = False
    parts_experts: bool = False
    _of_names: dict[Any, Encode | None] = field(default_factory=dict, compare=False)
    _of_shapes: dict[Any, tuple[Parts, Tensor]] = field(default_factory=dict, compare=False)

    def tensors(self, name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the stored tensors by name, and the dense tensor that they stand for."""
        stack = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)", name)
        if self.parts_experts and stack and tensor.dim() == 3:
            return self._of_experts(stack[1], stack[2], tensor)
        encoded = self._encoded(name, tensor)
        if encoded is None:
            return {name: tensor}, tensor
        parts, dense = encoded
        base = name.removesuffix(".weight")
        found = {f"{base}{suffix}": part for suffix, part in parts.items()}
        kind = base.rpartition(".")[2]
        if self.kv_scales and kind in ("k_proj", "v_proj"):
            found[f"{base}.{kind[0]}_scale"] = torch.ones(())
        return found, dense

    def _encoded(self, name: str, tensor: Tensor) -> tuple[Parts, Tensor] | None:
        """Encode a tensor; one without content is encoded once per form, dtype and shape."""
        if not tensor.is_meta:
            encode = self.encode(name, tuple(tensor.shape))
            return None if encode is None else encode(tensor)
        place = (re.sub(r"\.experts\.\d+\.", ".experts.", name), tensor.shape)
        if place not in self._of_names:
            self._of_names[place] = self.encode(name, tuple(tensor.shape))
        encode = self._of_names[place]
        key = (encode, tensor.shape, tensor.dtype)
        if encode is not None and key not in self._of_shapes:
            self._of_shapes[key] = encode(tensor)
        return self._of_shapes.get(key)

    def _of_experts(self, base: str, kind: str, stack: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Store each expert's matrices separately, if any of them is quantized."""
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        first = f"{base}.0.{names[0]}.weight"
        if self.encode(first, tuple(stack.shape[1:])) is None:
            return {f"{base}.{kind}": stack}, stack
        found: dict[str, Tensor] = {}
        if stack.is_meta:  # all alike
            alike = stack[0].chunk(len(names))
            for i in range(len(stack)):
                for name, matrix in zip(names, alike, strict=True):
                    found |= self.tensors(f"{base}.{i}.{name}.weight", matrix)[0]
            return found, stack
        experts = []
        for i, matrices in enumerate(stack):
            dense = []
            for name, matrix in zip(names, matrices.chunk(len(names)), strict=True):
                parts, stands_for = self.tensors(f"{base}.{i}.{name}.weight", matrix)
                found |= parts
                dense.append(stands_for)
            experts.append(torch.cat(dense))
        return found, torch.stack(experts)


def quantization_of(header: Header) -> Quantization | None:
    """Return the form that a header's settings name; None: 16-bit weights.

    Raises:
        UnknownFormError: this file does not implement it.
    """
    config = header.quantization
    if config is None:
        return None
    method = config.get("quant_method")
    if method == "mxfp4":
        return Quantization(lambda name, shape: mxfp4 if name.endswith("_proj") else None)
    known: dict[str | None, Callable[[dict[str, Any]], Quantization]] = {
        "fp8": _of_fp8,
        "modelopt": _of_modelopt,
        "awq": _of_awq,
        "gptq": _of_gptq,
        "auto-round": _of_auto_round,
        "compressed-tensors": _of_compressed,
    }
    if method not in known:
        raise UnknownFormError(f"quant_method {method!r}")
    return known[method](config)


@cache
def _with(encode: Callable[..., tuple[Parts, Tensor]], *given: Any, **named: Any) -> Encode:
    """Return the same object for equal encoders and settings, as a key of cached results."""
    return lambda weight: encode(weight, *given, **named)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    module = name.removesuffix(".weight")
    return (
        len(shape) == 2
        and name.endswith(".weight")
        and not module.endswith((".gate", "router", "shared_expert_gate", ".weights_proj"))
        and not any(part in name for part in _OTHERS)
    )


def _of_fp8(config: dict[str, Any]) -> Quantization:
    ignored = tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    blocks = config.get("weight_block_size")
    is_static = config.get("activation_scheme") == "static"

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        module = name.removesuffix(".weight")
        if not _is_linear(name, shape) or any(
            re.search(rf"(^|\.){re.escape(part)}(\.|$)", module) for part in ignored
        ):
            return None
        if blocks:
            return _with(fp8_blocks, *blocks)
        return _with(fp8_tensor, ".weight_scale_inv", ".activation_scale" if is_static else None)

    return Quantization(encode)


def _matches(name: str, patterns: list[str]) -> bool:
    module = name.removesuffix(".weight")
    return any(
        fnmatch.fnmatchcase(module, pattern)
        or re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", module)
        for pattern in patterns
    )


def _of_modelopt(config: dict[str, Any]) -> Quantization:
    ignored, each = config["ignore"], config.get("quantized_layers") or {}

    def algorithm(name: str) -> str | None:
        if config.get("quant_algo") == "MIXED_PRECISION":
            module = name.removesuffix(".weight")
            places = [module, module.partition(".experts.")[0] + ".experts"]
            return next((each[place]["quant_algo"] for place in places if place in each), None)
        return config.get("quant_algo")

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        if not _is_linear(name, shape) or _matches(name, ignored):
            return None
        match algorithm(name):
            case None:
                return None
            case "NVFP4":
                return nvfp4
            case "W4A16_NVFP4":
                return _with(nvfp4, None)
            case "FP8":
                return _with(fp8_tensor, ".weight_scale", ".input_scale")
            case other:
                raise UnknownFormError(f"quant_algo {other!r}")

    named = {found["quant_algo"] for found in each.values()} - {"NVFP4", "W4A16_NVFP4", "FP8"}
    if named:
        raise UnknownFormError(f"quant_algo {min(named)!r}")

    kv = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    return Quantization(encode, kv_scales=bool(kv), parts_experts=True)


def _of_awq(config: dict[str, Any]) -> Quantization:
    bits = config.get("bits", config.get("w_bit", 4))
    group = config.get("group_size", config.get("q_group_size", 128))
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise UnknownFormError(f"AWQ's version {config.get('version')!r}")
    ignored = list(config.get("modules_to_not_convert") or ())
    symmetric = not config.get("zero_point", True)

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        if not _is_linear(name, shape) or _matches(name, ignored):
            return None
        return _with(awq, bits, group, symmetric=symmetric)

    return Quantization(encode)


def _of_gptq(config: dict[str, Any]) -> Quantization:
    bits, group = config["bits"], config.get("group_size", 128)
    symmetric = bool(config.get("sym", True))
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        if not _is_linear(name, shape):
            return None
        return _with(gptq, bits, group, symmetric=symmetric, ordered=True, less=less)

    return Quantization(encode)


def _of_auto_round(config: dict[str, Any]) -> Quantization:
    packing = str(config.get("packing_format", ""))
    blocks = config.get("block_name_to_quantize") or ""
    named = blocks if isinstance(blocks, list) else [part for part in blocks.split(",") if part]
    bits, group, symmetric = config["bits"], config["group_size"], bool(config.get("sym", True))
    if bits not in (2, 4, 8):
        raise UnknownFormError(f"AutoRound's {bits} bits")

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        inside = not named or any(part in name for part in named)
        if not inside or not _is_linear(name, shape):
            return None
        if packing.endswith("awq"):
            return _with(awq, bits, group, symmetric=symmetric)
        less = 0 if packing == "auto_round" or packing.endswith("gptqmodel") else 1
        return _with(gptq, bits, group, symmetric=symmetric, ordered=False, less=less)

    return Quantization(encode)


def _of_compressed(config: dict[str, Any]) -> Quantization:
    ignored = list(config["ignore"])
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise UnknownFormError(f"{len(groups)} groups of compressed-tensors")
    (group,) = groups.values()
    if group.get("targets") != ["Linear"]:
        raise UnknownFormError(f"targets {group.get('targets')}")
    weights, inputs = group["weights"], group.get("input_activations")
    form = group.get("format") or config.get("format")
    if weights.get("symmetric") is False or weights.get("actorder"):
        raise UnknownFormError("zero points of compressed-tensors")

    def encode(name: str, shape: tuple[int, ...]) -> Encode | None:
        if not _is_linear(name, shape) or any(
            re.match(pattern[3:], name) if pattern.startswith("re:") else _matches(name, [pattern])
            for pattern in ignored
        ):
            return None
        if form == "pack-quantized":
            return _with(packed_ints, weights["num_bits"], weights["group_size"])
        if form == "int-quantized":
            return whole_ints
        if form == "nvfp4-pack-quantized":
            return _with(nvfp4, "given" if inputs else None, divides=True)
        if form in ("float-quantized", "naive-quantized"):
            if weights["strategy"] == "channel":
                return fp8_rows
            if weights["strategy"] == "tensor":
                static = inputs is not None and not inputs.get("dynamic")
                given = ".input_scale" if static else None
                return _with(fp8_tensor, ".weight_scale", given)
        raise UnknownFormError(f"format {form!r} with strategy {weights.get('strategy')!r}")

    return Quantization(encode)
