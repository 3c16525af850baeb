"""Predicts tokens/s of one stream from bandwidths, with experts on both sides of the bus.

A token takes its bytes on the device over the device's bandwidth, its experts' bytes in host memory
over the host's, and two crossings of the bus per layer there. With one stream the sides work in
turn, except for the shared expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.config.setting import nearest
from appliance.engine.memory.experts.streaming import HOST_GB_PER_SECOND
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


GIB = 2**30


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU model with its maker's figures: memory in GiB, and peak read bandwidth in GB/s."""

    name: str
    gib: float
    bandwidth: float


_TABLE = (
    KnownGpu("RTX 3060", 12, 360),
    KnownGpu("RTX 3060 Ti", 8, 448),
    KnownGpu("RTX 3070", 8, 448),
    KnownGpu("RTX 3070 Ti", 8, 608),
    KnownGpu("RTX 3080", 10, 760),
    KnownGpu("RTX 3080 Ti", 12, 912),
    KnownGpu("RTX 3090", 24, 936),
    KnownGpu("RTX 3090 Ti", 24, 1008),
    KnownGpu("RTX 4060", 8, 272),
    KnownGpu("RTX 4060 Ti", 8, 288),
    KnownGpu("RTX 4060 Ti 16GB", 16, 288),
    KnownGpu("RTX 4070", 12, 504),
    KnownGpu("RTX 4070 Super", 12, 504),
    KnownGpu("RTX 4070 Ti", 12, 504),
    KnownGpu("RTX 4070 Ti Super", 16, 672),
    KnownGpu("RTX 4080", 16, 717),
    KnownGpu("RTX 4080 Super", 16, 736),
    KnownGpu("RTX 4090", 24, 1008),
    KnownGpu("RTX 5060", 8, 448),
    KnownGpu("RTX 5060 Ti", 8, 448),
    KnownGpu("RTX 5060 Ti 16GB", 16, 448),
    KnownGpu("RTX 5070", 12, 672),
    KnownGpu("RTX 5070 Ti", 16, 896),
    KnownGpu("RTX 5080", 16, 960),
    KnownGpu("RTX 5090", 32, 1792),
    KnownGpu("RTX A4000", 16, 448),
    KnownGpu("RTX A5000", 24, 768),
    KnownGpu("RTX A6000", 48, 768),
    KnownGpu("RTX 6000 Ada", 48, 960),
    KnownGpu("RTX PRO 6000", 96, 1792),
    KnownGpu("L4", 24, 300),
    KnownGpu("A10", 24, 600),
    KnownGpu("A100 40GB", 40, 1555),
    KnownGpu("A100 80GB", 80, 2039),
    KnownGpu("H100", 80, 3350),
    KnownGpu("H200", 141, 4800),
)


def gpu_named(name: str) -> KnownGpu:
    """Find a GPU by name, ignoring maker, spaces and case.

    Raises:
        ConfigError: the table lacks it; the message lists the nearest names.
    """
    known = {_plain(gpu.name): gpu for gpu in _TABLE}
    found = known.get(_plain(name))
    if found is None:
        close = nearest(name, [gpu.name for gpu in _TABLE])
        raise ConfigError(f"no GPU {name!r} is in the table{close}")
    return found


def _plain(name: str) -> str:
    word = name.lower().replace("nvidia", "").replace("geforce", "")
    return "".join(letter for letter in word if letter.isalnum())
