"""Estimates a run's time before it starts: counted operations, at the rate of a short product.

The figures of a weight are of SmolLM2-135M on one core of a Xeon with AVX-512, whose rate was
`RATE_OF_FIGURES`.
"""

from __future__ import annotations

import time
from math import prod
from typing import TYPE_CHECKING

import torch

from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role
from appliance.progress.quantize_events import RunEstimated
from appliance.quant.quality.kv_caches import KV_FORMATS
from appliance.quant.run.evaluation_memory import KIND_TOKENS
from appliance.quant.run.options import Method
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.walk.slopes import TOKENS as SLOPE_TOKENS

if TYPE_CHECKING:
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.run.options import QuantizeOptions

PRODUCT = 1024  # rows and columns of the product that is timed
PRODUCTS = 6
RATE_OF_FIGURES = 175e9  # floating-point operations a second
# Microseconds of one core for a weight, beside products of matrices.
OF_WEIGHT = {
    Method.RTN: 0.05, Method.FP8: 0.02, Method.INT8: 0.02, Method.AWQ: 0.25, Method.GPTQ: 0.25,
    Method.AWQ_GPTQ: 0.5, Method.MXFP4: 0.25, Method.NVFP4: 0.25, Method.TRELLIS: 1.3,
}  # fmt: skip
EFFICIENCY = 0.55  # rate of a layer's products, in that of the large one
# Passes of the text through all layers, whole and in part: before each linear, and to the next.
PASSES, PASSES_FOR_SCALES = 2.5, 0.8
SLOPE_PASSES = 4  # to and fro, see `walk.slopes`
WRITING = 0.7  # rate of the engine, in that of the large product
SHARED = (Role.KEY, Role.VALUE, Role.UP)  # linears that read the input of another
CACHE_TOKENS = 1024  # of each KV cache on a card


def measured_rate(device: torch.device) -> float:
    """Return the floating-point operations a second of a float32 product, on all threads."""
    matrix = torch.rand(PRODUCT, PRODUCT, device=device)
    seconds = []
    for _ in range(PRODUCTS):
        started = time.perf_counter()
        found = matrix @ matrix
        found[0, 0].item()  # a GPU has finished then
        seconds.append(time.perf_counter() - started)
    return 2 * PRODUCT**3 / min(seconds)


def run_time(source: ModelSource, options: QuantizeOptions, rate: float) -> RunEstimated:
    """Estimate a run.

    Args:
        rate: of `measured_rate` on the run's device.
    """
    cores = torch.get_num_threads()
    slots = [slot for slot in source.slots() if slot.is_linear and slot.layer is not None]
    shares = {slot: _share(source, slot) for slot in slots}
    passing = sum(2 * share * prod(slot.shape) for slot, share in shares.items())  # a token
    spec = source.spec
    text = options.text or CalibrationText()
    method = options.method
    ends = 2 * spec.vocab_size * spec.hidden_size
    writing = products = 0.0
    if options.needs_text:
        if text.path is None and text.dataset is None:
            writing = text.num_tokens * (passing + ends) / (WRITING * rate)
        passes = PASSES + PASSES_FOR_SCALES * method.scales_inputs
        moments = sum(
            2 * share * slot.shape[1] ** 2
            for slot, share in shares.items()
            if slot.role not in SHARED
        )
        moments *= 1 + method.scales_inputs
        products = text.num_tokens * (passes * passing + moments)
    if method.weighs_outputs:
        products += SLOPE_TOKENS * (SLOPE_PASSES * passing + 3 * ends)
    if method.makes_up:
        products += sum(2 * prod(slot.shape) * slot.shape[1] for slot in slots)
    weights = sum(prod(slot.shape) for slot in slots)
    # A core is as much faster as its product is; a GPU's rate says nothing of that.
    on_gpu = options.device != "cpu"
    core = 1.0 if on_gpu else rate / cores / RATE_OF_FIGURES
    by_weight = 1e-6 * OF_WEIGHT[method] * weights / cores / core
    card = _card_products(source, options, passing) / (EFFICIENCY * rate)
    return RunEstimated(
        method=method.value,
        form=options.form,
        writing=writing,
        weights=by_weight + products / (EFFICIENCY * rate),
        card=card,
        cores=cores,
    )


def _share(source: ModelSource, slot: TensorSlot) -> float:
    """Return the share of tokens that pass a linear: experts see those that choose them."""
    assert slot.layer is not None
    mlp = source.spec.layers[slot.layer].mlp
    if slot.expert is None or not isinstance(mlp, ExpertsSpec):
        return 1.0
    return mlp.router.top_k / mlp.router.num_experts


def _card_products(source: ModelSource, options: QuantizeOptions, passing: float) -> float:
    """Count the operations of a card: base, result and rounding, caches and kinds of text."""
    if not options.card_tokens:
        return 0.0
    spec = source.spec
    models = 2 + (options.method is not Method.RTN)
    caches = (len(KV_FORMATS) + 2) * min(CACHE_TOKENS, options.card_tokens)
    tokens = models * options.card_tokens + caches + 2 * KIND_TOKENS
    return tokens * (passing + 2 * spec.vocab_size * spec.hidden_size)
