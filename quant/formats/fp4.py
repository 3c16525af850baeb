"""Reads folders of e2m1 weights: gpt-oss's MXFP4, ModelOpt's and compressed-tensors' NVFP4.

Each form is a table of part names and their meaning. The number formats belong to OCP (Microscaling
Formats, v1.0) and NVIDIA. Activations stay in 16 bits, whatever a folder asks for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.fp4 import GROUPS, Fp4Weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.checkpoint import SafetensorsFolder

MXFP4 = "mxfp4"  # quant_method of gpt-oss
E8M0, E4M3 = "float8_e8m0fnu", "float8_e4m3fn"
_WEIGHT = ".weight"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Fp4Form:
    """A form in which a weight M.weight is stored; suffixes are appended to M.

    Attributes:
        codes: suffix of the codes, two per byte, low nibble first.
        scale: suffix of the scales, one per group.
        scale_dtype: type of a scale's byte.
        tensor_scale: suffix of a float32 scale per tensor, or None.
        is_divisor: the weight is divided by the tensor scale.
        ignored: suffixes of parts for 4-bit activations.
        by_expert: weight N.experts.I.L is stored at index I of N.experts.L, with the codes of each
            group on an axis of their own.
    """

    name: str
    codes: str
    scale: str
    scale_dtype: str
    tensor_scale: str | None = None
    is_divisor: bool = False
    ignored: tuple[str, ...] = ()
    by_expert: bool = False


GPT_OSS = Fp4Form("MXFP4", "_blocks", "_scales", E8M0, by_expert=True)
MODELOPT_NVFP4 = Fp4Form(
    "NVFP4", ".weight", ".weight_scale", E4M3, ".weight_scale_2", ignored=(".input_scale",)
)
PACKED_NVFP4 = Fp4Form(
    "NVFP4",
    ".weight_packed",
    ".weight_scale",
    E4M3,
    ".weight_global_scale",
    is_divisor=True,
    ignored=(".input_global_scale",),
)
PACKED_MXFP4 = Fp4Form("MXFP4", ".weight_packed", ".weight_scale", E8M0)
# of compressed-tensors, by the config's format
PACKED = {"nvfp4-pack-quantized": PACKED_NVFP4, "mxfp4-pack-quantized": PACKED_MXFP4}
MODELOPT_ALGORITHM = "NVFP4"


def declared_form(config: Mapping[str, Any]) -> Fp4Form | None:
    """Return the form that a `quantization_config` declares; None for other weights.

    Raises:
        UnsupportedModelError: an unsupported group size, or formats that differ by module.
    """
    if config.get("quant_method") == MXFP4:
        return GPT_OSS
    nested = config.get("quantization")
    nested = nested if isinstance(nested, dict) else {}
    if config.get("quant_algo", nested.get("quant_algo")) == MODELOPT_ALGORITHM:
        size = config.get("group_size", nested.get("group_size", GROUPS[E4M3]))
        return _checked(MODELOPT_NVFP4, size)
    groups = config.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    names = {str(_format_of(group, config)) for group in groups.values()}
    if not names & PACKED.keys():
        return None
    if len(names) > 1:
        raise _unsupported(f"weights in {' and '.join(sorted(names))}")
    form = PACKED[names.pop()]
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = weights.get("group_size") if isinstance(weights, dict) else None
        _checked(form, size or GROUPS[form.scale_dtype])
    return form


def decode(
    name: str, form: Fp4Form, codes: Tensor, scale: Tensor, tensor_scale: Tensor | None
) -> Fp4Weight:
    """Build a weight from its stored parts.

    Args:
        codes: (out_features, in_features / 2), or (out_features, groups, 16), uint8.
        scale: (out_features, groups), uint8 or the form's type.
        tensor_scale: one element, if the form has one.

    Raises:
        CheckpointError: types or shapes do not match, or a scale is not finite.
    """
    types = [arrays.dtype_name(part.dtype) for part in (codes, scale)]
    if types[0] != "uint8" or types[1] not in ("uint8", form.scale_dtype):
        raise _damaged(name, form, f"codes of {codes.dtype} and scales of {scale.dtype}")
    codes = codes.flatten(1)
    rows, width = codes.shape
    if tuple(scale.shape) != (rows, 2 * width // GROUPS[form.scale_dtype]):
        found = f"codes of {(rows, width)} and scales of {tuple(scale.shape)}"
        raise _damaged(name, form, found)
    factor = arrays.like(codes, np.ones(1, dtype=np.float32))
    if tensor_scale is not None:
        factor = tensor_scale.float().flatten()
        if factor.numel() != 1 or not arrays.is_finite(factor) or not bool(factor.all()):
            raise _damaged(name, form, f"a scale of the whole weight of {factor.tolist()[:4]}")
    factor = (1 / factor if form.is_divisor else factor).expand(rows).contiguous()
    weight = Fp4Weight(
        codes.contiguous(), arrays.viewed(scale.contiguous(), form.scale_dtype), factor
    )
    if not weight.is_finite():
        raise _damaged(name, form, "a scale that is NaN")
    return weight


class Fp4Weights:
    """Reads a folder of one form, one tensor at a time; tensors without codes are dense.

    Args:
        folder: its config.json declares the form.
    """

    def __init__(self, folder: SafetensorsFolder, form: Fp4Form) -> None:
        self._folder = folder
        self._form = form
        self._stored = frozenset(folder.tensor_names())
        self._modules: dict[str, tuple[str, int | None]] = {}  # weight -> module, expert
        parts = set[str]()
        for name in self._stored:
            module = name.removesuffix(form.codes)
            if name == module or folder.dtype(name) != "uint8":
                continue
            parts |= {module + suffix for suffix in self._suffixes()}
            if not form.by_expert:
                self._modules[module + _WEIGHT] = module, None
                continue
            experts, _, linear = module.rpartition(".")
            for expert in range(folder.shape(name)[0]):
                self._modules[f"{experts}.{expert}.{linear}{_WEIGHT}"] = module, expert
        self._names = sorted(self._modules.keys() | (self._stored - parts))

    def tensor_names(self) -> list[str]:
        """List every tensor; a quantized weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        if name not in self._modules:
            return self._folder.shape(name)
        module, expert = self._modules[name]
        shape = self._folder.shape(module + self._form.codes)
        rows, *inputs = shape if expert is None else shape[1:]
        return rows, 2 * math.prod(inputs)

    def packed_bits(self, name: str) -> int | None:
        """Return None: the codes are not integers."""
        return None

    def float_bits(self, name: str) -> int | None:
        return 4 if name in self._modules else None

    def notes(self) -> tuple[str, ...]:
        return ()

    def load(self, name: str) -> Tensor | Fp4Weight:
        if name not in self._modules:
            return self._folder.load(name)
        module, expert = self._modules[name]
        form = self._form
        codes = self._part(name, module + form.codes, expert)
        scale = self._part(name, module + form.scale, expert)
        whole = None
        if form.tensor_scale is not None:
            whole = self._part(name, module + form.tensor_scale, None)
        return decode(name, form, codes, scale, whole)

    def _part(self, name: str, part: str, expert: int | None) -> Tensor:
        if part not in self._stored:
            raise CheckpointError(f"{part} is missing, a part of {name}; download the model again")
        if expert is None:
            return self._folder.load(part)
        if expert >= self._folder.shape(part)[0]:
            raise CheckpointError(f"{part} has nothing of {name}; download the model again")
        return self._folder.load_rows(part, expert, expert + 1)[0]

    def _suffixes(self) -> tuple[str, ...]:
        form = self._form
        whole = () if form.tensor_scale is None else (form.tensor_scale,)
        return (form.codes, form.scale, *whole, *form.ignored)


def _format_of(group: object, config: Mapping[str, Any]) -> object:
    return (group.get("format") if isinstance(group, dict) else None) or config.get("format")


def _checked(form: Fp4Form, group_size: object) -> Fp4Form:
    if group_size != GROUPS[form.scale_dtype]:
        raise _unsupported(f"{form.name} in groups of {group_size}")
    return form


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model has {what}; supported are MXFP4 in groups of {GROUPS[E8M0]} and NVFP4 in"
        f" groups of {GROUPS[E4M3]}, the same for all quantized modules"
    )


def _damaged(name: str, form: Fp4Form, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has {found}, which is no weight in {form.name}; download the model again"
    )
