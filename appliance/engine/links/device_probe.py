"""Tests devices' links in another process, since a copy that hangs cannot be stopped in this one.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.links.choice import LinkChoice, choose_link
from appliance.engine.links.device_messages import (
    DeviceMemory,
    LinkTask,
    ProbeLine,
    ProbeOrder,
    TaskBegun,
    TaskEnded,
    all_tasks,
)
from appliance.engine.links.link import LinkSpeed, LinkTrial
from appliance.engine.links.trial import TRIAL_SECONDS
from appliance.errors import EngineError
from appliance.runtime import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMAND = (sys.executable, "-P", "-m", "appliance.engine.links")
START_SECONDS = 60.0  # to import torch and open devices, which tests nothing yet
_GRACE_SECONDS = 0.5  # beside a test's own limit


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """The memory of some devices, and the links between them.

    Attributes:
        memory: of each device.
        links: by pair of places, the lower one first.
    """

    memory: tuple[DeviceMemory, ...]
    links: dict[tuple[int, int], LinkChoice]


def probe_devices(
    devices: Sequence[str],
    num_bytes: float,
    *,
    limit: float = TRIAL_SECONDS,
    command: Sequence[str] = COMMAND,
) -> DeviceProbe:
    """Measure devices, test all links between them, and choose each pair's path.

    A test that hangs ends the process; a new process runs the remaining tests.

    Args:
        devices: torch's names, such as cuda:0.
        num_bytes: what a rank sends in one exchange.
        limit: seconds per test.
        command: starts the process; the order is appended.

    Raises:
        EngineError: the process cannot open the devices.
    """
    tasks, memory = all_tasks(devices), dict[int, DeviceMemory]()
    trials: dict[LinkTask, LinkTrial] = {}
    while left := [task for task in tasks if task not in trials]:
        measures = len(memory) < len(devices)
        order = ProbeOrder(tuple(devices), tuple(left), measures, limit)
        before = len(trials) + len(memory)
        said = _run([*command, msgspec.json.encode(order).decode()], limit, memory, trials)
        if len(trials) + len(memory) == before:
            words = said.strip().splitlines()[-1:] or ["it told nothing"]
            raise EngineError(f"the links of {', '.join(devices)} were not tested: {words[0]}")
    pairs = {(task.first, task.second) for task in tasks}
    return DeviceProbe(
        tuple(memory[place] for place in sorted(memory)),
        {
            pair: choose_link(
                [trials[task] for task in tasks if (task.first, task.second) == pair], num_bytes
            )
            for pair in sorted(pairs)
        },
    )


def _run(
    command: Sequence[str],
    limit: float,
    memory: dict[int, DeviceMemory],
    trials: dict[LinkTask, LinkTrial],
) -> str:
    """Run the process until it ends or hangs; return what it wrote to its log."""
    with TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=child_environment(),
        )
        assert process.stdout is not None
        task: LinkTask | None = None
        problem = "ended the process that tested it"
        try:
            for line in _lines(process.stdout.fileno(), limit + _GRACE_SECONDS):
                match line:
                    case DeviceMemory():
                        memory[line.place] = line
                    case TaskBegun():
                        task = line.task
                    case TaskEnded():
                        assert task is not None
                        speed = LinkSpeed(line.seconds, line.bytes_per_second)
                        found = None if line.problem else speed
                        trials[task], task = LinkTrial(task.path, found, line.problem), None
        except TimeoutError:
            problem = f"did not answer in time: {limit:.1f} s"
        finally:
            process.kill()
            process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                process.wait(limit)
        if task is not None:
            trials[task] = LinkTrial(task.path, None, problem)
        log.seek(0)
        return log.read().decode(errors="replace")


def _lines(descriptor: int, limit: float) -> Iterator[ProbeLine]:
    """Yield the process's lines until it closes its end.

    Raises:
        TimeoutError: none came for `limit` seconds in a test, or for `START_SECONDS` before.
    """
    decoder: msgspec.json.Decoder[ProbeLine] = msgspec.json.Decoder(ProbeLine)
    rest, patience = b"", START_SECONDS
    while True:
        until = time.monotonic() + patience
        while b"\n" not in rest:
            ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            if not (some := os.read(descriptor, 1 << 16)):
                return
            rest += some
        first, _, rest = rest.partition(b"\n")
        line = decoder.decode(first)
        patience = START_SECONDS if isinstance(line, DeviceMemory) else limit
        yield line
