"""Writes a KV plan to a checkpoint: `kv_cache.json`, and FP8 scales for other readers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.files import read_json
from appliance.model.executor import heads_of
from appliance.model_files.checkpoint import write_json
from appliance.quant.formats.kv_plan import FILE, SCALE_NAMES, read_plan, to_json
from appliance.quant.kv.calibrate import KVPlan, calibrate_kv
from appliance.quant.run.shard_writer import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.source import ModelSource
    from appliance.quant.run.shard_writer import PlacedTensors
    from appliance.quant.text.calibration import Calibration

# At up to this many bits, other readers use an FP8 cache.
MOST_BITS_FOR_FP8 = 8.5


def kept_kv_plan(
    source: ModelSource,
    calibration: Calibration,
    state: Path,
    device: torch.device,
    budget: float,
) -> KVPlan:
    """Return the plan of an earlier run, or make one with `calibrate_kv` and keep it.

    `budget` is in mean bits per element; `state` is the folder of this run's state.

    Raises:
        QuantizeError: even the fewest bits exceed the budget.
    """
    layers = read_plan(state, heads_of(source.spec))
    if layers is not None:
        return KVPlan(layers, float(read_json(state / FILE)["bits_per_element"]), budget)
    with tempfile.TemporaryDirectory(dir=state, prefix="kv-") as place:
        plan = calibrate_kv(source, calibration.rows, Path(place), device, budget)
    write_kv_plan(plan, state)
    return plan


def write_kv_plan(plan: KVPlan, folder: Path) -> None:
    write_json(folder / FILE, to_json(plan.layers, plan.bits))


def kv_scale_layouts(source: ModelSource, plan: KVPlan | None) -> list[TensorLayout]:
    return [TensorLayout(name, torch.float32, (1,)) for name, _ in _scales(source, plan)]


def write_kv_scales(source: ModelSource, plan: KVPlan | None, writer: PlacedTensors) -> None:
    """Write an FP8 scale for each layer's keys and values: the largest head's."""
    for name, scale in _scales(source, plan):
        writer.write(name, [torch.tensor([scale])])


def with_kv_scheme(config: dict[str, Any], plan: KVPlan | None) -> dict[str, Any]:
    """Add the FP8 cache's scheme to config.json."""
    if plan is None or plan.budget > MOST_BITS_FOR_FP8:
        return config
    scheme = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    quantization = config["quantization_config"] | {"kv_cache_scheme": scheme}
    return config | {"quantization_config": quantization}


def _scales(source: ModelSource, plan: KVPlan | None) -> Iterator[tuple[str, float]]:
    if plan is None or plan.budget > MOST_BITS_FOR_FP8:
        return
    for index, layer in enumerate(plan.layers):
        for name, scales in zip(SCALE_NAMES, layer.plain_scales, strict=True):
            yield source.family.names.in_layer(index, name), float(scales.max())
