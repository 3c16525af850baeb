"""How close a quantized model's answers are to those of the model it was made from, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.backend import select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.walk.block import ObservedLinear
from bench.cpu.quality import CPU, Comparison, run

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.decoder import Decoder


def dense_decoder(path: Path) -> Decoder:
    """A model whose weights, dequantized once, and activations are float32."""
    backend = replace(select_backend(CPU), prepare_linear=_dense_linear)
    return load_decoder(open_model(path), backend, CPU, torch.float32)


def _dense_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> ObservedLinear:
    dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    return ObservedLinear(dense.to(dtype), None if bias is None else bias.to(dtype))


def compare(base: Decoder, candidate: Decoder, windows: list[list[int]]) -> dict[str, Any]:
    """KL divergence, same-top and perplexity over windows of tokens."""
    comparison = Comparison()
    with torch.inference_mode():
        for window in windows:
            exact, ours = (run(d, window, KVFormat.FP32, len(window)) for d in (base, candidate))
            comparison.add(exact, ours, window)
    found = comparison.summary()
    found.pop("seconds")
    return found
