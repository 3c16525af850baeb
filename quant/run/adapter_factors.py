"""Keeps factors folded into a quantized model, so that it can serve the original's adapters.

AWQ's scales are folded into norms, values and up; the factors of even keys into queries and keys.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.model.adapters.reader import FACTORS_NAME, INPUTS, OUTPUTS
from appliance.model_files.checkpoint import write_safetensors
from appliance.quant.walk.places import row_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.formats.kv_plan import KVLayer

SCALES = "input_scales"  # key in a layer's facts: scales of its four linears


def scales_as_facts(scales: Sequence[Tensor | None]) -> dict[str, Any]:
    """Return the input scales of a layer's linears, (in_features,) each, as JSON."""
    if not any(one is not None for one in scales):
        return {}
    return {SCALES: [None if one is None else _encoded(one) for one in scales]}


def write_adapter_factors(
    source: ModelSource,
    facts: Iterable[tuple[int, Mapping[str, Any]]],
    kv_layers: Sequence[KVLayer],
    folder: Path,
) -> None:
    """Write all factors into a model's folder, if there are any.

    Args:
        facts: layer index and facts of each layer's record.
        kv_layers: the KV plan, whose key factors the weights have.
    """
    factors: dict[str, Tensor] = {}
    for index, found in facts:
        scales = [None if one is None else _decoded(one) for one in found.get(SCALES, ())]
        if scales:
            factors |= _of_scales(source, index, scales)
    for index, layer in enumerate(kv_layers):
        if layer.key_factors is not None:
            for name, outputs in _of_keys(source, index, layer.key_factors):
                before = factors.get(name + OUTPUTS)
                factors[name + OUTPUTS] = outputs if before is None else before * outputs
    if factors:
        tensors = {name: factor.float().clone() for name, factor in factors.items()}
        write_safetensors(folder / FACTORS_NAME, tensors)


def _of_scales(
    source: ModelSource, index: int, scales: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Return the factors of a layer's linears, given the scales of their inputs."""
    attention = source.spec.attention_layers[index]
    stored = source.family.names.linears(index)
    found: dict[str, Tensor] = {}
    for names, inputs in zip(stored, scales, strict=True):
        if inputs is not None:
            found |= {_module(name) + INPUTS: inputs for name in names}
    _, of_heads, _, of_middle = scales
    if of_heads is not None:
        # Query heads share a value head and thus its scale.
        heads = of_heads.view(attention.num_kv_heads, -1, attention.head_dim)
        values = heads[:, 0].reshape(-1)
        found |= _last_rows(source, stored[0], values, row_places(source, index)[0])
    if of_middle is not None:
        found |= _last_rows(source, stored[2], of_middle, None)
    return found


def _last_rows(
    source: ModelSource, names: Sequence[str], divisors: Tensor, places: Tensor | None
) -> dict[str, Tensor]:
    """Return the output factors of linears, seen as one, whose last rows are divided.

    Args:
        places: see `row_places`.
    """
    sizes = [source.weights.shape(name)[0] for name in names]
    outputs = torch.ones(sum(sizes))
    outputs[len(outputs) - len(divisors) :] = divisors
    own = _stored(outputs, places).split(sizes)[-1]
    return {_module(names[-1]) + OUTPUTS: own}


def _stored(outputs: Tensor, places: Tensor | None) -> Tensor:
    return outputs if places is None else outputs[places]


def _of_keys(source: ModelSource, index: int, factors: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Yield the output divisors of the linears that produce queries and keys."""
    attention = source.spec.attention_layers[index]
    queries = factors.repeat_interleave(attention.num_heads // attention.num_kv_heads, 0)
    every = torch.cat((1 / queries, factors, torch.ones_like(factors))).flatten()
    every = _stored(every, row_places(source, index)[0])
    start = 0
    for name in source.family.names.linears(index)[0]:
        rows = source.weights.shape(name)[0]
        yield _module(name), every[start : start + rows]
        start += rows


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _encoded(scales: Tensor) -> str:
    return b64encode(scales.float().cpu().numpy().astype("<f4").tobytes()).decode()


def _decoded(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(b64decode(text), dtype="<f4").copy())
