"""Collects a checkpoint's facts that need no measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.model.reader import ModelReader
from appliance.quant.quality.card import (
    ModelFacts,
    weights_fingerprint,
)
from appliance.quant.quality.readers import readers_of
from appliance.quant.quality.stored_size import stored_size
from appliance.quant.run.plan import stored_dtype

if TYPE_CHECKING:
    from appliance.model.source import ModelSource


def facts_of(source: ModelSource) -> ModelFacts:
    """Collect a checkpoint's facts that need no computation."""
    size = stored_size(source)
    return ModelFacts(
        name=source.path.name,
        architecture=source.spec.architecture,
        weights=_weights_in_words(source),
        parameters=size.parameters,
        stored_bytes=size.stored_bytes,
        linear_parameters=size.linear_parameters,
        linear_bytes=size.linear_bytes,
        fingerprint=weights_fingerprint(source.path),
        readers=readers_of(source),
    )


def quantizes_inputs(candidate: ModelSource) -> bool:
    config = candidate.config.get("quantization_config")
    if not isinstance(config, dict):
        return False
    groups = config.get("config_groups") or {}
    return config.get("activation_scheme") is not None or any(
        group.get("input_activations") is not None for group in groups.values()
    )


def _weights_in_words(source: ModelSource) -> str:
    # In the C library's types: GGUF's and FP4 stay as stored.
    reader = ModelReader(source, torch.device("cpu"), stored_dtype(source), native=True)
    is_packed = any(source.weights.packed_bits(slot.name) for slot in source.slots())
    for index in range(len(source.spec.layers) if is_packed else 1):  # packed layers may be mixed
        reader.layer(index)
    reader.embedding_and_head()
    return reader.weight_format()
