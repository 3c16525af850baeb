"""Predicts tokens/s of one stream from bandwidths, with experts on both sides of the bus.

A token takes its bytes on the device over the device's bandwidth, its experts' bytes in host memory
over the host's, and two crossings of the bus per layer there. With one stream the sides work in
turn, except for the shared expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.memory.experts.streaming import HOST_GB_PER_SECOND
from appliance.engine.memory.known_gpus import gpu_named
from appliance.errors import ConfigError
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from appliance.engine.memory.experts.split import ExpertsOnHost
    from appliance.engine.memory.plan import MemoryPlan
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


# Assumed, not measured: the latency of a small copy, a wait for it and a copy back on PCI Express.
CROSSING_SECONDS = 15e-6


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds per token of one stream, by place."""

    device: float
    host: float
    crossings: float

    @property
    def per_second(self) -> float:
        return 1 / (self.device + self.host + self.crossings)


def token_time(
    source: ModelSource,
    weight_bytes: int,
    kv_bytes: float,
    on_host: ExpertsOnHost,
    device_gb_per_second: float,
    linear_bits: float | None = None,
) -> TokenTime:
    """Predict the time of a token.

    Args:
        source: of the model.
        weight_bytes: on the device.
        kv_bytes: of keys, values and states, that a step of one stream reads and writes.
        on_host: experts that are not on the device.
        device_gb_per_second: what the device reads.
        linear_bits: of a weight of the layers; None: as they are stored.
    """
    shares = {
        index: one.mlp.router.top_k / one.mlp.router.num_experts
        for index, one in enumerate(source.spec.layers)
        if isinstance(one.mlp, ExpertsSpec)
    }
    share = _active_share(source, shares, on_host.layers, linear_bits)
    chosen = 0.0
    if on_host.layers:
        mean = sum(shares[layer] for layer in on_host.layers) / len(on_host.layers)
        chosen = on_host.num_bytes * mean
    return TokenTime(
        device=(weight_bytes * share + kv_bytes) / (device_gb_per_second * 1e9),
        host=chosen / (HOST_GB_PER_SECOND * 1e9),
        crossings=2 * CROSSING_SECONDS * len(on_host.layers),
    )


def split_in_words(
    source: ModelSource, plan: MemoryPlan, kv_bytes_per_token: int, device: str
) -> str:
    """Describe the experts in host memory, the reason, and the predicted cost."""
    on_host = plan.host_experts
    total = sum(isinstance(layer.mlp, ExpertsSpec) for layer in source.spec.layers)
    reason = "as --experts-on-cpu asks"
    if not on_host.is_asked:
        reason = f"since {as_size(plan.budget_bytes)} may be used of {device}"
    split = (
        f"experts of {len(on_host.layers)} of {total} layers stay in host memory"
        f" ({as_size(on_host.num_bytes)}) and are multiplied there, {reason}"
    )
    if on_host.streaming is not None:
        split = f"{split}; {on_host.streaming.in_words()}"
    try:
        bandwidth = gpu_named(device.removesuffix(" Laptop GPU")).bandwidth
    except ConfigError:
        return f"{split}; what {device} reads per second is not known, so nothing is predicted"
    kv_bytes = kv_bytes_per_token * plan.context_length / 2
    time = token_time(source, plan.weight_bytes, kv_bytes, on_host, bandwidth)
    return (
        f"{split}; predicted, not measured: {time.per_second:,.0f} tokens/s at most for one stream"
        f" at half of the context, {1e3 * time.device:,.1f} ms on the GPU at {bandwidth:,.0f} GB/s,"
        f" {1e3 * time.host:,.1f} ms in host memory at {HOST_GB_PER_SECOND:,.0f} GB/s,"
        f" {1e3 * time.crossings:,.1f} ms across the bus"
    )


def _active_share(
    source: ModelSource,
    shares: dict[int, float],
    on_host: Collection[int],
    linear_bits: float | None,
) -> float:
    """Return the share of the device's bytes of weights that a token reads."""
    total, active = 0.0, 0.0
    for slot in source.slots():
        if slot.expert is not None and slot.layer in on_host:
            continue
        bits = linear_bits if slot.is_linear and linear_bits else _bits(source, slot.name)
        size = math.prod(slot.shape) * bits
        total += size
        active += size * _share(slot, shares, tied=source.spec.tied_head)
    return active / total


def _bits(source: ModelSource, name: str) -> float:
    """Return the bits of a weight as stored, without scales; dense ones have 16."""
    weights = source.weights
    return weights.packed_bits(name) or weights.float_bits(name) or 16


def _share(slot: TensorSlot, shares: dict[int, float], *, tied: bool) -> float:
    if slot.role is Role.EMBEDDING and not tied:
        return 0.0
    if slot.expert is None or slot.layer is None:
        return 1.0
    return shares.get(slot.layer, 1.0)
