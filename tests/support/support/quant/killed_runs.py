"""Runs a quantization again and again, killed each time, until it finishes.

A script, so that torch is imported once and its threads begin in the children: a fork of this
process is a fresh run. Prints a line of JSON for each result: {"kills": ..., "layers": [...]}. The
layers are in the order in which runs began to read them. "published" marks where the result got its
name; what comes after that replaces it.

Usage: killed_runs.py MODEL TEXT METHOD:(writes|moments):SEED:OUT...
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.staging import StagingFolders
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.walk.pieces import FloatReader

# All the ways in which the pipeline changes the disk.
CHANGES = [
    *((os, name) for name in ("fsync", "pwrite", "write", "posix_fallocate", "unlink", "rmdir")),
    *((Path, name) for name in ("rename", "replace", "mkdir", "write_bytes", "write_text")),
    (shutil, "copyfile"),
]
MOST_KILLS = 60
# Changes of the disk that a run lives to see; a trellis makes 119 until its first layer is done.
MOST_CHANGES, MOST_CHANGES_OF_TRELLIS = 130, 150
PUBLISHED = "published"


def die_at(call: int) -> None:
    """Kill this process before, or in the middle of, its n-th change of the disk."""
    calls = 0

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                if name in ("write", "pwrite"):
                    data = arguments[1]
                    function(arguments[0], data[: len(data) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return change

    for owner, name in CHANGES:
        setattr(owner, name, counted(name, getattr(owner, name)))


def live_until(moment: int) -> Iterator[int]:
    """Count the calls and returns of the main thread's functions; kill this process at one of them.

    Processor time would serve as well if its clock ticked more than a few times in a run.
    """
    moments = itertools.count(1)

    def live(*_: object) -> None:
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(live)
    return moments


def main() -> None:
    model, text, *runs = sys.argv[1:]
    if any(run.startswith(f"{Method.TRELLIS.value}:") for run in runs):
        import_module("sympy")  # as torch does for the first slopes, in each child
    for run in runs:
        method, how, seed, out = run.split(":", 3)
        found = until_it_ends(model, out, text, method, int(seed), how)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()  # else the next fork would write it again


def until_it_ends(
    model: str, out: str, text: str, method: str, seed: int, how: str
) -> dict[str, Any]:
    """Run it and kill it until it finishes; return what it prints."""
    rng = random.Random(seed)
    trace = Path(out).with_name("trace")
    is_trellis = Method(method) is Method.TRELLIS
    options = QuantizeOptions(
        TrellisScheme(2) if is_trellis else WeightScheme(4, 32, False),
        Method(method),
        CalibrationText(Path(text), num_tokens=480, row_tokens=48),
        format=WeightFormat.TRELLIS if is_trellis else WeightFormat.COMPRESSED_TENSORS,
        overwrite=True,
    )

    def run(calls: int) -> None:
        layer = FloatReader.layer

        def traced(self: FloatReader, index: int) -> Any:
            with trace.open("a") as file:
                file.write(f"{index}\n")
            return layer(self, index)

        FloatReader.layer = traced  # type: ignore[method-assign, assignment]
        discard = StagingFolders.discard

        def traced_discard(self: StagingFolders) -> None:
            if self.out.exists():
                with trace.open("a") as file:
                    file.write(f"{PUBLISHED}\n")
            discard(self)

        StagingFolders.discard = traced_discard  # type: ignore[method-assign]
        if calls:
            die_at(calls)
        quantize_model(Path(model), Path(out), options)

    most = MOST_CHANGES_OF_TRELLIS if Method(method) is Method.TRELLIS else MOST_CHANGES
    told = Path(out).with_name("moments")
    for kills in range(MOST_KILLS):
        calls = rng.randint(1, most) if how == "writes" else 0
        moment = rng.randrange(int(told.read_text())) + 1 if told.exists() else 0
        child = os.fork()
        if child == 0:
            moments = live_until(moment) if how == "moments" else None
            try:
                run(calls)
                sys.setprofile(None)
                if moments is not None:
                    told.write_text(str(next(moments)))
            finally:
                os._exit(int(sys.exc_info()[0] is not None))
        _, status = os.waitpid(child, 0)
        if how == "moments" and not kills:  # the first run counts the moments of a run
            shutil.rmtree(out)
            trace.unlink(missing_ok=True)
            continue
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            layers = trace.read_text().split() if trace.exists() else []
            return {"kills": kills, "layers": layers}
    raise AssertionError("it never came to its end")


main()
