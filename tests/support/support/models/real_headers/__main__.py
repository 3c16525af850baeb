"""Try the headers of real models, one line each.

    scripts/real_headers FOLDER...               # every folder in them that has a config.json,
                                                 # and folders of templates (*.jinja) and of
                                                 # listed GGUF metadata (*.kv.txt)
    scripts/real_headers tests/model/real_settings.json                    # what CI tries
    scripts/real_headers FOLDER --only qwen3     # those whose name has this in it
    scripts/real_headers FOLDER --way small      # scaled down, against transformers
    scripts/real_headers FOLDER --way whole      # in its full size, without weights
    scripts/real_headers FOLDER --way texts      # sampling, ends, control tokens, chats
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from support.models.real_headers.gguf_metadata import try_listing
from support.models.real_headers.header import CONFIG, Header, headers_in
from support.models.real_headers.refusals import is_right
from support.models.real_headers.settings import read_settings, write_settings
from support.models.real_headers.texts import OF_TEXTS, try_template, try_texts
from support.models.real_headers.trial import Outcome, try_small, try_whole

_WAYS = ("whole", "small", "texts", "template", "listing")


@dataclass(frozen=True, slots=True)
class _Trial:
    """One attempt, by one way, at one header.

    Attributes:
        header: selects the reasons for which it may be refused.
    """

    name: str
    way: str
    run: Callable[[Path], Outcome]
    header: Header


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--way", choices=_WAYS, help="without it, all")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 2 if left out")
    parser.add_argument("--reduce", type=Path, metavar="FILE", help="write settings, try nothing")
    given = parser.parse_args()
    if given.reduce:
        write_settings((one for each in given.folders for one in _headers(each)), given.reduce)
        return 0
    logging.disable(logging.WARNING)
    found = [one for each in given.folders for one in _trials(each)]
    wanted = [one for one in found if given.only.lower() in one.name.lower()]
    wanted = [one for one in wanted if given.way in (None, one.way)]
    counts: Counter[str] = Counter()
    import transformers.modeling_utils  # noqa: F401  # once, for all processes

    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        counts.update(pool.imap_unordered(_tried, wanted))
    for state, count in sorted(counts.items()):
        print(f"{state} {count}")
    return int(any(state.endswith(("wrong", "REFUSED", "untried")) for state in counts))


def _headers(place: Path) -> Iterable[Header]:
    return read_settings(place) if place.is_file() else headers_in(place)


def _trials(place: Path) -> Iterator[_Trial]:
    """List the attempts for a folder of folders, or for a file of settings."""
    for header in _headers(place):
        yield _Trial(header.name, "whole", partial(try_whole, header), header)
        yield _Trial(header.name, "small", partial(try_small, header), header)
        path = place / header.name
        if any((path / name).is_file() for name in OF_TEXTS):
            yield _Trial(header.name, "texts", partial(try_texts, path), header)
    if place.is_file():
        return
    for file in sorted(place.glob("*/*.jinja")):
        if not (file.parent / CONFIG).is_file():
            yield _Trial(file.name, "template", partial(try_template, file), Header(file.name, {}))
    for file in sorted(place.glob("*/*.kv.txt")):
        yield _Trial(file.name, "listing", partial(try_listing, file), Header(file.name, {}))


def _tried(trial: _Trial) -> str:
    start = time.monotonic()
    outcome = _outcome(trial)
    state = outcome.state
    if state == "refused" and not is_right(trial.header, outcome.reason):
        state = "REFUSED"
    reason = " ".join(outcome.reason.partition("; choose a model among Llama")[0].split())[:300]
    took = time.monotonic() - start
    print(f"{state:8} {trial.way:8} {trial.name} [{took:.0f} s]: {reason}", flush=True)
    return f"{trial.way}: {f'served {outcome.served}' if outcome.served else state}"


def _outcome(trial: _Trial) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            return trial.run(Path(folder))
        except Exception as error:  # an error of ours: the trial looks for these
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return Outcome("wrong", f"{type(error).__name__} at {where}: {error}")


sys.exit(main())
