"""Try the headers of real models, one line each.

    scripts/real_headers FOLDER...               # every folder in them that has a config.json
    scripts/real_headers tests/model/real_settings.json                    # what CI tries
    scripts/real_headers FOLDER --only qwen3     # those whose name has this in it
    scripts/real_headers FOLDER --way small      # scaled down, against transformers; or "whole"
    scripts/real_headers FOLDER --jobs 4         # processes, of a gigabyte or two each
    scripts/real_headers FOLDER --reduce tests/model/real_settings.json    # write what CI reads

Ends with 1 if something is wrong, or refused for a reason that is not in the list of reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from real_headers.header import Header, headers_in
from real_headers.refusals import is_right
from real_headers.settings import read_settings, write_settings
from real_headers.trial import Outcome, try_small, try_whole

_WAYS = {"whole": try_whole, "small": try_small}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--way", choices=_WAYS, help="without it, both")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 2 if left out")
    parser.add_argument("--reduce", type=Path, metavar="FILE", help="write settings, try nothing")
    given = parser.parse_args()
    if given.reduce:
        write_settings((one for each in given.folders for one in _headers(each)), given.reduce)
        return 0
    logging.disable(logging.WARNING)
    headers = [one for each in given.folders for one in _headers(each)]
    wanted = [one for one in headers if given.only.lower() in one.name.lower()]
    ways = [given.way] if given.way else list(_WAYS)
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for states in pool.imap_unordered(partial(_tried, ways=ways), wanted):
            counts.update(states)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return int(any(state.startswith(("wrong", "REFUSED", "untried")) for state in counts))


def _headers(place: Path) -> Iterable[Header]:
    return read_settings(place) if place.is_file() else headers_in(place)


def _tried(header: Header, ways: list[str]) -> list[str]:
    states = []
    for way in ways:
        start = time.monotonic()
        outcome = _outcome(header, way)
        state = outcome.state
        if state == "refused" and not is_right(header, outcome.reason):
            state = "REFUSED"
        reason = " ".join(outcome.reason.partition("; supported are Llama")[0].split())[:300]
        took = time.monotonic() - start
        print(f"{state:8} {way:5} {header.name} [{took:.0f} s]: {reason}", flush=True)
        states.append(f"{state} {way}")
    return states


def _outcome(header: Header, way: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            return _WAYS[way](header, Path(folder))
        except Exception as error:  # of ours: that is what the trial is for
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return Outcome("wrong", f"{type(error).__name__} at {where}: {error}")


sys.exit(main())
