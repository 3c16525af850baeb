"""Reads e2m1 weights: gpt-oss's MXFP4, ModelOpt's and compressed-tensors' NVFP4, AutoRound's.

Each form is a table of part names and their meaning. The number formats belong to OCP (Microscaling
Formats, v1.0) and NVIDIA. Activations stay in 16 bits, whatever a folder asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import GROUPS, Fp4Weight
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model_files.checkpoint import SafetensorsFolder
    from appliance.quant.formats.reader import WeightReader

MXFP4 = "mxfp4"  # quant_method of gpt-oss
E8M0, E4M3 = "float8_e8m0fnu", "float8_e4m3fn"
_WEIGHT = ".weight"


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


def check_group_size(form: Fp4Form, declared: object) -> None:
    """Raise UnsupportedModelError if a config declares another group size than the form's."""
    size = GROUPS[form.scale_dtype]
    if declared not in (None, size):
        raise UnsupportedModelError(
            f"this model has {form.name} in groups of {declared}; supported are MXFP4 in groups of"
            f" {GROUPS[E8M0]} and NVFP4 in groups of {GROUPS[E4M3]}; quantize the 16-bit model that"
            " it was made from with appliance quantize"
        )


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
        factor = tensor_scale.float().reshape(-1)
        if factor.numel() != 1 or not arrays.is_finite(factor) or not bool(factor.all()):
            raise _damaged(name, form, f"a scale of the whole weight of {factor.tolist()[:4]}")
    factor = (1 / factor if form.is_divisor else factor).expand(rows).contiguous()
    weight = Fp4Weight(
        codes.contiguous(), arrays.viewed(scale.contiguous(), form.scale_dtype), factor
    )
    if not weight.is_finite():
        raise _damaged(name, form, "a scale that is NaN")
    return weight


class Fp4Weights(DenseWeights):
    """Reads weights of some forms, one tensor at a time; another reader has all others.

    Args:
        folder: holds the weights.
        forms: that its config declares; the type of a module's scales decides between them.
        rest: reads the tensors that are of none of them.
    """

    def __init__(
        self, folder: SafetensorsFolder, forms: Sequence[Fp4Form], rest: WeightReader
    ) -> None:
        super().__init__(folder)
        self._rest = rest
        self._stored = frozenset(folder.tensor_names())
        self._modules: dict[str, tuple[Fp4Form, str, int | None]] = {}  # form, module, expert
        parts = set[str]()
        (codes,) = {form.codes for form in forms}
        for name in self._stored:
            module = name.removesuffix(codes)
            if name == module or folder.dtype(name) != "uint8":
                continue
            form = self._form_of(module, forms)
            parts |= {module + suffix for suffix in _suffixes(form)}
            if not form.by_expert:
                self._modules[module + _WEIGHT] = form, module, None
                continue
            experts, _, linear = module.rpartition(".")
            for expert in range(folder.shape(name)[0]):
                self._modules[f"{experts}.{expert}.{linear}{_WEIGHT}"] = form, module, expert
        self._names = sorted(self._modules.keys() | (set(rest.tensor_names()) - parts))

    def _form_of(self, module: str, forms: Sequence[Fp4Form]) -> Fp4Form:
        for form in forms:
            scale = module + form.scale
            kinds = (form.scale_dtype, "uint8") if form.scale_dtype == E8M0 else (E4M3,)
            if scale in self._stored and self._folder.dtype(scale) in kinds:
                return form
        return forms[0]

    def tensor_names(self) -> list[str]:
        """List every tensor; a quantized weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        if name not in self._modules:
            return self._rest.shape(name)
        form, module, expert = self._modules[name]
        shape = self._folder.shape(module + form.codes)
        rows, *inputs = shape if expert is None else shape[1:]
        return rows, 2 * math.prod(inputs)

    def packed_bits(self, name: str) -> int | None:
        """Return None for this form, whose codes are not integers."""
        return None if name in self._modules else self._rest.packed_bits(name)

    def group_size(self, name: str) -> int | None:
        return None if name in self._modules else self._rest.group_size(name)

    def float_bits(self, name: str) -> int | None:
        return 4 if name in self._modules else self._rest.float_bits(name)

    def notes(self) -> tuple[str, ...]:
        return self._rest.notes()

    def load(self, name: str) -> Weight:
        if name not in self._modules:
            return self._rest.load(name)
        form, module, expert = self._modules[name]
        codes = self._part(name, module + form.codes, expert)
        scale = self._part(name, module + form.scale, expert)
        whole = None
        if form.tensor_scale is not None:
            whole = self._part(name, module + form.tensor_scale, None)
        return decode(name, form, codes, scale, whole)

    def load_matrix(self, name: str, index: int, *, transposed: bool) -> Weight | None:
        if not isinstance(self._rest, DenseWeights):
            return None
        return self._rest.load_matrix(name, index, transposed=transposed)

    def _part(self, name: str, part: str, expert: int | None) -> Tensor:
        if part not in self._stored:
            raise CheckpointError(f"{part} is missing, a part of {name}; download the model again")
        if expert is None:
            return self._folder.load(part)
        if expert >= self._folder.shape(part)[0]:
            raise CheckpointError(f"{part} has nothing of {name}; download the model again")
        return self._folder.load_rows(part, expert, expert + 1)[0]


def _suffixes(form: Fp4Form) -> tuple[str, ...]:
    whole = () if form.tensor_scale is None else (form.tensor_scale,)
    return (form.codes, form.scale, *whole, *form.ignored)


def _damaged(name: str, form: Fp4Form, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has {found}, which is no weight in {form.name}; download the model again"
    )
