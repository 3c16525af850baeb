"""Reads adapters written by llama.cpp's `convert_lora_to_gguf`."""

from __future__ import annotations

import math
import re
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from appliance.errors import AdapterError, ModelError
from appliance.files import open_regular
from appliance.gguf import GGUFFile
from appliance.kernels.weights.weight import dense
from appliance.model.adapters.adapter import Adapter
from appliance.model.adapters.factors import Factors
from appliance.model.adapters.targets import adapter_targets, unserved_linears
from appliance.model.families.limits import short
from appliance.model.recurrent_spec import GatedDeltaSpec
from appliance.model.row_orders import attention_rows, halves_from_pairs
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.families.family import GGUFMapping
    from appliance.model.source import ModelSource

_FACTOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<which>[ab])")
_HASHED_AT_ONCE = 1 << 20  # bytes


def read_gguf(path: Path, base: ModelSource, targets: Mapping[str, AdapterTarget]) -> Adapter:
    """Read and check an adapter.

    Raises:
        AdapterError: the file is damaged, of another kind or architecture, or changes something
            unsupported.
    """
    try:
        return _read(path, GGUFFile(path), base, targets)
    except AdapterError:
        raise
    except (ModelError, OSError) as error:
        raise AdapterError(str(error)) from None


def _read(
    path: Path, file: GGUFFile, base: ModelSource, targets: Mapping[str, AdapterTarget]
) -> Adapter:
    mapping = base.family.gguf
    if mapping is None:
        raise AdapterError(
            f"{path}: adapters in GGUF files are not supported for {base.family.name} models; use"
            " the folder that PEFT saved"
        )
    _check_metadata(path, file, mapping)
    if base.family.names != (mapping.own_names or base.family.names):
        raise AdapterError(
            f"{path}: GGUF files split linears that {base.path.name} has whole; use the folder that"
            " PEFT saved"
        )
    alpha = _alpha(path, file.metadata.get("adapter.lora.alpha") or 0.0)
    stored_targets = adapter_targets(base.spec, mapping.names)
    renamed = dict(zip(stored_targets, targets.values(), strict=True))
    factors = Factors(path, targets, partial(unserved_linears, base.spec, mapping.names))
    for stored in file.tensor_names():
        found = _FACTOR.fullmatch(stored)
        if found is None:
            raise factors.wrong(stored, "is no factor of a LoRA; merge the adapter into the model")
        target = renamed.get(found["module"])
        matrix = dense(file.load(stored), torch.float32)
        is_first = found["which"] == "a"
        if target is not None and not is_first:
            rows = _stored_rows(path, base, mapping, target)
            matrix = matrix if rows is None or len(rows) != len(matrix) else matrix[rows]
        module = found["module"] if target is None else target.name
        factors.add(stored, module, is_first=is_first, factor=matrix)
    parts = factors.paired(lambda module, rank: alpha / rank if alpha else 1.0)
    named = str(file.metadata.get("general.base_model.0.name") or "")
    return Adapter(_digest(path), parts, factors.notes(named, base.path.name))


def _alpha(path: Path, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise AdapterError(
        f"{path}: adapter.lora.alpha is {short(value)}, but must be a number; convert the adapter"
        " anew"
    )


def _check_metadata(path: Path, file: GGUFFile, mapping: GGUFMapping) -> None:
    for field, wanted, fix in (
        ("general.type", "adapter", "give a model's file as the model"),
        ("adapter.type", "lora", "only LoRA adapters are supported"),
        (
            "general.architecture",
            mapping.architecture,
            "the adapter belongs to a model of another architecture",
        ),
    ):
        found = file.metadata.get(field)
        if found != wanted:
            raise AdapterError(f"{path}: {field} is {short(found)} instead of {wanted!r}; {fix}")
    if file.metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError(
            f"{path}: adapter.alora.invocation_tokens is set; an activated adapter begins inside a"
            " prompt, which is not supported: train a plain LoRA"
        )


def _stored_rows(
    path: Path, base: ModelSource, mapping: GGUFMapping, target: AdapterTarget
) -> NDArray[np.int64] | None:
    """Return each output's stored row; None if the order is the checkpoint's."""
    mixer = base.spec.layers[target.layer].mixer
    if isinstance(mixer, GatedDeltaSpec) and mapping.tiled_values:
        raise AdapterError(
            f"{path}: {target.name} is a recurrent linear, whose heads GGUF files order"
            " differently; use the folder that PEFT saved"
        )
    if target.slot.role is Role.QKV and base.family.names.qkv_by_key_head:
        return attention_rows(base.spec.attention_layers[target.layer]).argsort()
    if target.slot.role not in (Role.QUERY, Role.KEY) or not mapping.interleaved_rope:
        return None
    head_dim = base.spec.attention_layers[target.layer].head_dim
    return halves_from_pairs(target.slot.shape[0], head_dim)


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with open_regular(path) as file:
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()
