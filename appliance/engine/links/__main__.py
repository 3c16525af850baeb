"""Tests devices' links in a process that can be ended: `python -m appliance.engine.links ORDER`."""

from __future__ import annotations

import sys

import msgspec
import torch

from appliance.engine.links.device_link import DeviceLink, device_bandwidth
from appliance.engine.links.device_messages import (
    DeviceMemory,
    ProbeLine,
    ProbeOrder,
    TaskBegun,
    TaskEnded,
)
from appliance.engine.links.trial import new_seed, try_link


def _tell(line: ProbeLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _run(order: ProbeOrder) -> None:
    devices = [torch.device(name) for name in order.devices]
    for place, device in enumerate(devices if order.measures else []):
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        _tell(DeviceMemory(place, device_bandwidth(device), free))
    for task in order.tasks:
        _tell(TaskBegun(task))
        link = DeviceLink(devices[task.first], devices[task.second], task.path)
        trial = try_link(link, new_seed(), order.limit)
        speed = trial.speed
        _tell(
            TaskEnded(
                0.0 if speed is None else speed.seconds,
                0.0 if speed is None else speed.bytes_per_second,
                trial.problem,
            )
        )


if __name__ == "__main__":
    _run(msgspec.json.decode(sys.argv[1], type=ProbeOrder))
