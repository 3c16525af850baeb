"""Replaces the process that tests devices' links: `fake_probe.py FAULT ORDER`.

The direct path hangs, dies or changes data, or both paths do; or the probe never reports.
"""

from __future__ import annotations

import json
import os
import sys
import time


def tell(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


fault, order = sys.argv[1], json.loads(sys.argv[2])
if fault == "silent":
    sys.exit("CUDA driver version is insufficient")
if order["measures"]:
    for place in range(len(order["devices"])):
        tell(type="DeviceMemory", place=place, bytes_per_second=9e11, free_bytes=2**34)
for task in order["tasks"]:
    tell(type="TaskBegun", task=task)
    if task["path"] == "peer to peer" or fault.startswith("both"):
        if fault.endswith("hangs"):
            time.sleep(600)
        if fault.endswith("dies"):
            os.abort()
        if fault.endswith("corrupts"):
            tell(type="TaskEnded", seconds=0, bytes_per_second=0, problem="changes data")
            continue
    tell(type="TaskEnded", seconds=2e-5, bytes_per_second=9e9, problem="")
